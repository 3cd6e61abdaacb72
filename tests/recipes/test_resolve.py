"""From names, files and overrides to recipes, and back."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tcm.method.distances import SquaredL2
from tcm.method.times import LogNormal, LogStudentT
from tcm.recipes.resolve import differences, resolve, shipped, to_toml
from tcm.recipes.schema import DataSpec, Recipe
from tcm.recipes.stages.consistency import ConsistencyStage
from tcm.recipes.stages.diffusion import DiffusionStage
from tcm.recipes.stages.truncated import TruncatedStage


def written(recipe: Recipe) -> Recipe:
    """The recipe after a way through a file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(to_toml(recipe), "utf-8")
        return resolve(str(file))


@pytest.mark.parametrize("name", shipped())
def test_toml_round_trip(name: str) -> None:
    recipe = resolve(name)
    assert recipe.name == name
    assert written(recipe) == recipe
    assert list(written(recipe).stages) == list(recipe.stages)


@pytest.mark.parametrize("name", shipped())
def test_toml_states_every_key(name: str) -> None:
    def keys(table: object) -> int:
        return len(type(table).model_fields) if isinstance(table, BaseModel) else len(fields(table))

    recipe = resolve(name)
    lines = [line for line in to_toml(recipe).splitlines() if " = " in line]
    tables = [value for _, value in recipe if isinstance(value, BaseModel) or is_dataclass(value)]
    own = keys(recipe) - len(tables) - len(["stages"])
    assert len(lines) == own + sum(map(keys, [*tables, *recipe.stages.values()]))


def test_a_number_replaces_a_word_that_stands_for_one() -> None:
    """`"continue"` and `"none"` are words, and a number may take their place on the command line."""
    assert resolve("imagenet64-s", ["truncated.schedule_offset=7"]).stages["truncated"].schedule_offset == 7
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(to_toml(resolve("cifar10")), "utf-8")
        assert resolve(str(file), ["truncated.clip=1.5"]).stages["truncated"].clip == 1.5


finite = st.floats(1e-300, 1e300)


@settings(deadline=None, max_examples=60)
@given(
    path=st.text(st.characters(exclude_categories=["Cs"])),
    seed=st.integers(0, 2**70),
    sigma=st.floats(1e-300, 1e6),
    rate=finite,
    clip=st.none() | finite,
    dropout=st.none() | st.floats(0, 0.99),
    shape=st.none() | st.tuples(st.integers(1, 4), st.just(16), st.just(32)),
)
def test_round_trip_of_any_value(
    path: str, seed: int, sigma: float, rate: float, clip: float | None, dropout: float | None, shape: object
) -> None:
    digits = resolve("digits")
    stage = digits.stages["diffusion"].model_copy(update={"clip": clip, "dropout": dropout, "learning_rate": rate})
    recipe = digits.model_copy(
        update={
            "data": DataSpec(path=path),
            "seed": seed,
            "sigma_data": sigma,
            "image_shape": shape,
            "stages": {"diffusion": stage},
        }
    )
    assert written(recipe) == recipe


def test_overrides() -> None:
    recipe = resolve(
        "cifar10",
        [
            "truncated.t_prime=0.5",
            "consistency.steps=1000",
            "data.path=/some where/a=b.zip",
            "network.channels=64",
            "network.channel_mult=[1, 2]",
            "seed=3",
            "truncated.guard.on=false",
            "truncated.times.nu=2",
            "stages.truncated.compile=true",
            "truncated.distance={kind='squared_l2'}",
        ],
    )
    truncated = recipe.stages["truncated"]
    assert isinstance(truncated, TruncatedStage)
    assert (truncated.t_prime, truncated.compile, truncated.guard.on) == (0.5, True, False)
    assert truncated.times == LogStudentT(mean=0.0, std=0.2, nu=2.0)
    assert truncated.distance == SquaredL2()
    assert recipe.stages["consistency"].steps == 1000
    assert recipe.data.path == "/some where/a=b.zip"
    assert (recipe.network.channels, recipe.network.channel_mult, recipe.seed) == (64, (1, 2), 3)


@pytest.mark.parametrize("text", ["2024", "true", "[1]", "a\nb = 3", "1\nb = 3", '"2024"', "inf"])
def test_text_stays_text(text: str) -> None:
    assert resolve("digits", [f"data.path={text}"]).data.path == text.strip('"')


def test_another_kind_replaces_the_table() -> None:
    changes = ["truncated.times.kind=lognormal", "truncated.times.mean=0.5", "truncated.times.std=1"]
    assert resolve("digits", changes).stages["truncated"].times == LogNormal(mean=0.5, std=1.0)
    network = resolve("cifar10", ["network.kind=edm2", "network.channels=64"]).network
    assert (network.kind, network.blocks) == ("edm2", 3)


def test_none_unsets() -> None:
    stage = resolve("digits", ["consistency.teacher=none"]).stages["consistency"]
    assert isinstance(stage, ConsistencyStage)
    assert stage.teacher is None
    assert resolve("digits", ["image_shape=none", "network.channels=36"]).image_shape is None


def test_extends_and_order(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        "extends = 'cifar10'\n"
        "[stages.again]\nobjective = 'truncated'\nsteps = 7\nbatch = 8\nlearning_rate = 1e-5\nt_prime = 4.0\n"
    )
    (tmp_path / "deep").mkdir()
    child = tmp_path / "deep" / "child.toml"
    child.write_text(
        "extends = '../base.toml'\norder = ['consistency', 'middle', 'truncated', 'again']\n"
        "[stages.truncated]\ninit = 'consistency'\n"
        "[stages.middle]\nobjective = 'consistency'\nsteps = 9\nbatch = 8\nlearning_rate = 1e-5\nt_high = 1.0\n"
    )
    base = resolve(str(tmp_path / "base.toml"))
    assert (base.name, list(base.stages)) == ("base", ["consistency", "truncated", "again"])
    recipe = resolve(str(child), ["again.steps=8"])
    assert (recipe.name, list(recipe.stages)) == ("child", ["consistency", "middle", "truncated", "again"])
    assert recipe.stages["again"].steps == 8
    assert recipe.stages["truncated"].batch == 1024
    assert written(recipe) == recipe


def test_order_of_a_base_does_not_drop_new_stages(tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text(
        "extends = 'imagenet64-xl'\nsecond_time = 4.0\n"
        "[stages.again]\nobjective = 'truncated'\nsteps = 7\nbatch = 8\nlearning_rate = 1e-5\nt_prime = 4.0\n"
    )
    assert list(resolve(str(file)).stages) == ["truncated", "again"]


def test_second_time_follows_the_last_truncated_stage_unless_it_is_given() -> None:
    assert resolve("cifar10").second_time == 1.0
    assert resolve("cifar10", ["truncated.t_prime=1.5"]).second_time == 1.5
    assert resolve("cifar10", ["truncated.t_prime=0.5"]).second_time == 1.0
    assert resolve("cifar10", ["truncated.t_prime=1.5", "second_time=3"]).second_time == 3.0
    assert resolve("imagenet64-xl-t1.5").second_time == 1.526
    moved = resolve("cifar10", ["truncated.t_prime=1.5"])
    assert differences(resolve("cifar10"), moved) == ["second_time: 1.0 → 1.5", "truncated.t_prime: 1.0 → 1.5"]


def test_differences() -> None:
    cifar10 = resolve("cifar10")
    assert differences(cifar10, resolve("cifar10")) == []
    changed = resolve(
        "cifar10", ["seed=3", "truncated.times.nu=2", "truncated.clip=1", "consistency.betas=[0.9, 0.99]"]
    )
    assert differences(cifar10, changed) == [
        "seed: 0 → 3",
        "consistency.betas: [0.9, 0.999] → [0.9, 0.99]",
        'truncated.clip: "none" → 1.0',
        "truncated.times.nu: 0.01 → 2.0",
    ]
    assert differences(cifar10, resolve("cifar10", ["order=['consistency']"])) == [
        "stages: consistency, truncated → consistency"
    ]
    kind = differences(cifar10, resolve("cifar10", ["truncated.times={kind='lognormal', mean=0.0, std=0.2}"]))
    assert kind == ['truncated.times.kind: "logstudentt" → "lognormal"', "truncated.times.nu: 0.01 → absent"]


def test_a_recipe_is_a_value_in_python_too() -> None:
    stage = DiffusionStage(steps=1, batch=2, learning_rate=1e-3, init="scratch")
    recipe = Recipe(name="mine", data=DataSpec(path="x"), network=resolve("digits").network, stages={"only": stage})
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 4  # type: ignore[misc]
    assert written(recipe) == recipe


def test_the_second_time_lies_below_a_low_start() -> None:
    """Methods that start from noise at 1 or below need no second_time in their recipe."""
    low = ["t_max=0.9", "truncated.t_prime=0.3"]
    assert resolve("digits", low).second_time == 0.45
    assert resolve("digits", [low[0], "truncated.t_prime=0.6"]).second_time == 0.6
