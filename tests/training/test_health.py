"""Signs that a run will not learn, or has not: before the first step, in its samples, in its metrics."""

from pathlib import Path

import numpy as np
import pytest
import torch
from inprocess import begin, events, train, unchanged
from launching import tiny_recipe

from tcm.data import ArrayDataset, open_dataset
from tcm.data.summary import summarize
from tcm.recipes.resolve import resolve, shipped
from tcm.training import health
from tcm.training.health import (
    Variation,
    featurelessness,
    long_averages,
    warnings_at_start,
    warnings_in,
    wrong_sigma_data,
)


@pytest.mark.parametrize(("decay", "steps", "wrong"), [(0.99, 300, False), (0.99, 299, True), (0.9999, 1000, True)])
def test_an_average_longer_than_a_third_of_the_run(decay: float, steps: int, wrong: bool) -> None:
    recipe = resolve("digits", [f"diffusion.averages=[{{kind='constant', decay={decay}}}]", f"diffusion.steps={steps}"])
    found = long_averages("diffusion", recipe.stages["diffusion"])
    assert bool(found) == wrong
    if wrong:
        assert f"decay={decay:g} averages over {1 / (1 - decay):,.0f} steps" in found[0]


def test_the_remedy_is_one() -> None:
    changes = ["diffusion.averages=[{kind='constant', decay=0.9999}]", "diffusion.steps=1000"]
    (said,) = long_averages("diffusion", resolve("digits", changes).stages["diffusion"])
    assert "a decay of at most 0.997," in said
    changes[0] = changes[0].replace("0.9999", "0.997")
    assert long_averages("diffusion", resolve("digits", changes).stages["diffusion"]) == []


@pytest.mark.parametrize("name", shipped())
def test_no_shipped_recipe_averages_for_too_long(name: str) -> None:
    recipe = resolve(name)
    assert [long_averages(stage, spec) for stage, spec in recipe.stages.items()] == [[] for _ in recipe.stages]


@pytest.mark.parametrize(("flip", "wrong"), [("true", True), ("false", False)])
def test_mirrored_digits(flip: str, wrong: bool) -> None:
    found = warnings_at_start(resolve("digits", [f"data.flip={flip}"]), "diffusion", open_dataset("digits"), 0.75)
    assert any("set data.flip=false" in one for one in found) == wrong


def test_sigma_data_far_from_the_datas() -> None:
    digits = open_dataset("digits")
    right = summarize(digits).sigma_data
    for sigma_data in (right, right * 1.49, right / 1.49):
        assert wrong_sigma_data(sigma_data, digits) == []
    for sigma_data in (right * 1.51, right / 1.51):
        (said,) = wrong_sigma_data(sigma_data, digits)
        assert said == f"sigma_data={sigma_data:g} is far from the data's standard deviation, 0.75; set sigma_data=0.75"
    (said,) = wrong_sigma_data(0.5, ArrayDataset(np.full((5, 1, 8, 8), 7, np.uint8)))
    assert "nothing to learn" in said


def test_flat_and_grey_samples() -> None:
    data = Variation.of(torch.rand(64, 3, 8, 8) * 2 - 1)
    grey = torch.full((64, 3, 8, 8), 0.1) + 0.01 * torch.randn(64, 3, 8, 8)
    one_colour_each = (torch.rand(64, 1, 1, 1) * 2 - 1).expand(64, 3, 8, 8)
    assert "differ from each other by 0.01" in str(featurelessness(Variation.of(grey), data))
    assert "are flat" in str(featurelessness(Variation.of(one_colour_each), data))
    assert featurelessness(Variation.of(torch.rand(64, 3, 8, 8) - 0.5), data) is None


def test_flat_samples_are_an_event_at_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FEATURELESS", 100.0)  # no sample varies as much
    loop, stop = begin(tmp_path, "diffusion", unchanged, "diffusion.sample_every=6")
    assert loop.run(stop)
    assert [(event["step"], event["event"]) for event in events(tmp_path)] == [(12, "featureless")]
    assert "this stage has not learned" in events(tmp_path)[0]["reason"]


def test_a_run_says_so_at_its_start_and_once(tmp_path: Path) -> None:
    changes = ("sigma_data=0.3", "diffusion.averages=[{kind='constant', decay=0.9999}]", 'order=["diffusion"]')
    recipe = tiny_recipe(6, *changes)
    printed = train(recipe, tmp_path / "run")
    said = [event for event in events(tmp_path / "run" / "0-diffusion") if event["event"] == "warning"]
    assert [event["step"] for event in said] == [0, 0]
    assert "decay=0.9999" in said[0]["reason"]
    assert "sigma_data=0.3" in said[1]["reason"]
    for event in said:
        assert printed.count(event["reason"]) == 1
    assert "warning" not in train(recipe, tmp_path / "run")


def test_which_warnings_still_hold() -> None:
    lines = [
        {"step": 0, "event": "warning", "reason": "sigma"},
        {"step": 5, "spread": 0.1},
        {"step": 5, "event": "collapse", "reason": "then"},
        {"step": 7, "event": "skipped", "reason": "a spike"},
        {"step": 10, "spread": 0.2},
        {"step": 10, "event": "featureless", "reason": "now"},
    ]
    assert warnings_in(lines) == ["sigma", "now"]


def test_what_compile_does_not_reach() -> None:
    words = ["truncated.compile=true"]
    assert health.uncompiled_tangents("truncated", resolve("digits", words).stages["truncated"]) == []
    by_tangents = resolve("digits", [*words, "truncated.target=tangent"]).stages["truncated"]
    (warning,) = health.uncompiled_tangents("truncated", by_tangents)
    assert warning.startswith("truncated.compile=true compiles the pass with gradient, but not the tangent pass")
