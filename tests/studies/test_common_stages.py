"""The key of a stage: the same for what does not matter to its weights, another for what does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Stage
from tcm.studies.common_stages import same_weights, shared_stages, stage_key, stages_to_train
from tcm.studies.resolve import resolve_study, variants_of
from tcm.studies.running import Part
from tcm.studies.schema import Variant

DEMO = resolve("demo")

HARMLESS = st.sampled_from(
    [
        *("name=other", "second_time=2.0", "data.workers=2", "adapts=false", "continued.baseline=false"),
        "truncated.companion=true",
        *("*.keep=7", "*.log_every=3", "*.checkpoint_every=11", "*.sample_every=0", "*.accumulation=2"),
    ]
)
"""For the weights of all stages."""

DECISIVE = {
    "seed=1": {"diffusion", "consistency", "truncated", "continued"},
    "data.flip=true": {"diffusion", "consistency", "truncated", "continued"},
    "data.path=stream:digits": {"diffusion", "consistency", "truncated", "continued"},
    "network.channels=16": {"diffusion", "consistency", "truncated", "continued"},
    "t_max=70.0": {"diffusion", "consistency", "truncated", "continued"},
    "diffusion.steps=1200": {"diffusion", "consistency", "truncated", "continued"},
    "consistency.learning_rate=1e-3": {"consistency", "truncated", "continued"},
    "consistency.curriculum.limit=0.8": {"consistency", "truncated", "continued"},
    "truncated.t_prime=0.5": {"truncated"},
    "truncated.times.nu=2.0": {"truncated"},
    "truncated.target=tangent": {"truncated"},
    "truncated.init=diffusion": {"truncated"},
    "continued.batch=64": {"continued"},
    "continued.guard.spike=30.0": {"continued"},
}


def keys(recipe: Recipe) -> dict[str, str]:
    return {name: stage_key(recipe, name) for name in recipe.stages}


@settings(max_examples=20)
@given(st.lists(HARMLESS, unique_by=lambda override: override.partition("=")[0]), st.sampled_from([*DECISIVE]))
def test_a_key_changes_with_what_decides_the_weights_and_with_nothing_else(harmless: list[str], decisive: str) -> None:
    same, other = resolve("demo", harmless), resolve("demo", [*harmless, decisive])
    assert keys(same) == keys(DEMO)
    assert {name for name, key in keys(other).items() if key != keys(DEMO)[name]} == DECISIVE[decisive]


def test_a_key_does_not_depend_on_keys_that_have_their_default() -> None:
    """A later version may have more of them. Kinds count, and recipes that agree in a key are compared in full."""
    assert stage_key(DEMO, "truncated") == stage_key(resolve("demo", ["truncated.label_dropout=0.0"]), "truncated")
    other = DEMO.model_copy(update={"stages": DEMO.stages | {"truncated": _with_default(DEMO.stages["truncated"])}})
    assert stage_key(other, "truncated") == stage_key(DEMO, "truncated")
    assert not same_weights(other, DEMO, "truncated")
    assert same_weights(resolve("demo", ["truncated.companion=true", "second_time=2.0"]), DEMO, "truncated")


def _with_default(stage: Stage) -> Stage:
    """The stage of a version in which clip was 3 by default."""
    fields = type(stage).model_fields
    changed = type("Changed", (type(stage),), {"__annotations__": {"clip": fields["clip"].annotation}, "clip": 3.0})
    return changed(**{key: value for key, value in dict(stage).items() if key != "clip"})


def test_the_stage_that_previous_means_counts() -> None:
    """`truncated.init=previous` is another stage when another one comes before it."""
    reordered = resolve("demo", ['order=["diffusion", "consistency", "continued", "truncated"]'])
    assert keys(reordered)["continued"] == keys(DEMO)["continued"]
    assert keys(reordered)["truncated"] != keys(DEMO)["truncated"]


def test_times_that_are_watched_count_only_where_they_decide_something() -> None:
    """A stage that trains until it is flat at t' is another one for another t'; so is one that t' is chosen by."""
    until_flat = ["consistency.until_flat=true"]
    one, other = (keys(resolve("demo", [*until_flat, f"truncated.t_prime={t}"])) for t in (1.0, 0.5))
    assert one["consistency"] != other["consistency"]
    assert one["diffusion"] == other["diffusion"]
    assert keys(resolve("demo", ["truncated.t_prime=auto"]))["consistency"] != keys(DEMO)["consistency"]


def test_a_stage_is_trained_by_the_part_of_the_recipe_that_it_needs() -> None:
    study = resolve_study("truncation")
    assert study.base == "demo"
    variants = variants_of(study, 0)
    recipes = {stage.name: list(stage.recipe.stages) for stage in shared_stages(study, variants).values()}
    assert recipes["diffusion"] == ["diffusion"]
    assert recipes["continued"] == ["diffusion", "consistency", "continued"]
    watched = [replace(variant, recipe=resolve("demo", ["consistency.until_flat=true"])) for variant in variants]
    recipes = {stage.name: list(stage.recipe.stages) for stage in shared_stages(study, watched).values()}
    assert recipes["diffusion"] == ["diffusion"]
    assert recipes["consistency"] == ["diffusion", "consistency", "truncated"]
    assert recipes["continued"] == list(DEMO.stages), "the times of stage 2 decide when stage 1 ends"


@pytest.mark.parametrize(
    ("stage", "curve", "expected"),
    [("consistency", (), 2), ("truncated", (), 3), ("consistency", ("truncated", "elsewhere"), 3)],
)
def test_only_what_is_measured_is_trained(stage: str, curve: tuple[str, ...], expected: int) -> None:
    study = resolve_study("truncation")
    study = study.model_copy(update={"measure": study.measure.model_copy(update={"curve": curve})})
    assert len(stages_to_train(study, Variant("one", DEMO, stage))) == expected


def test_parts_are_disjoint_and_together_all() -> None:
    """With as many parts as seeds, each has a seed of its own and shares no stage with another."""
    study = resolve_study("boundary")
    variants = [variant for seed in study.seeds for variant in variants_of(study, seed)]
    for count in (1, 2, 3, len(study.seeds)):
        parts = [Part(index, count).of(variants) for index in range(1, count + 1)]
        names = [(variant.name, variant.seed) for part in parts for variant in part]
        assert sorted(names) == sorted((variant.name, variant.seed) for variant in variants)
    assert [{variant.seed for variant in part} for part in parts] == [{seed} for seed in study.seeds]
