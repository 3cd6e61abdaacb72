"""The pictures are the model's own samples."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tcm.data import to_uint8
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Classes
from tcm.method.sampling import ConsistencySampler
from tcm.recipes.resolve import resolve
from tcm.report.drawing import COLUMNS, PATHS, STRIPS, interpolate, observe_run, path_from_noise, shown_stage
from tcm.report.records import read_run
from tcm.weights import Model


def _model(run: Path) -> Model:
    return Model.load(run / "3-truncated" / "model")


def test_a_path_ends_where_sampling_ends(fair_run: Path) -> None:
    model = _model(fair_run)
    for steps in (1, 2, 4):
        path = path_from_noise(model, steps)
        classes = Classes(10).spread(PATHS)
        expected = to_uint8(model.sample(seeds=range(PATHS), condition=classes, steps=steps))
        assert torch.equal(path.outputs[-1], expected)
        assert len(path.outputs) == len(path.inputs) == len(path.times) == steps


def test_interpolations_begin_and_end_at_samples(fair_run: Path) -> None:
    model = _model(fair_run)
    strips = interpolate(model)
    classes = Classes(10).spread(STRIPS)
    first = to_uint8(model.sample(seeds=range(0, 2 * STRIPS, 2), condition=classes))
    last = to_uint8(model.sample(seeds=range(1, 2 * STRIPS, 2), condition=classes))
    assert int((strips[:, 0].int() - first.int()).abs().max()) <= 1
    assert int((strips[:, -1].int() - last.int()).abs().max()) <= 1
    assert not torch.equal(first, last)


def test_interpolations_are_the_samplers_own(fair_run: Path) -> None:
    """Two steps where the sampler takes two, the second noise the same along a strip."""
    model = _model(fair_run)

    class TwoSteps(ConsistencySampler):
        usual_steps = (2,)

    two = replace(model, card=model.card.model_copy(update={"sampler": TwoSteps(second_time=2.0)}))
    strips, streams = interpolate(two), SampleStreams(range(0, 2 * STRIPS, 2))
    classes = Classes(10).spread(STRIPS)
    first = to_uint8(model.sample(seeds=range(0, 2 * STRIPS, 2), condition=classes, times=(80.0, 2.0)))
    assert int((strips[:, 0].int() - first.int()).abs().max()) <= 1
    streams.normal((1, 8, 8))
    second, noise = streams.normal((1, 8, 8)), SampleStreams(range(1, 2 * STRIPS, 2)).normal((1, 8, 8))
    with torch.no_grad():
        x = model.denoiser(80 * noise, torch.full((STRIPS,), 80.0), classes)
        x = model.denoiser(x + 2 * second, torch.full((STRIPS,), 2.0), classes)
    assert int((strips[:, -1].int() - to_uint8(x).int()).abs().max()) <= 1


def test_every_stage_is_drawn_from_the_same_seeds(fair_run: Path) -> None:
    observed = observe_run(read_run(fair_run))
    assert [(one.stage.name, drawn.way) for one in observed.drawings for drawn in one.drawn] == [
        ("diffusion", "Heun"),
        ("consistency", "one step"),
        ("consistency", "two steps"),
        ("continued", "one step"),
        ("continued", "two steps"),
        ("truncated", "one step"),
        ("truncated", "two steps"),
    ]
    expected = _model(fair_run).sample(seeds=range(COLUMNS), condition=Classes(10).spread(COLUMNS), steps=2)
    assert torch.equal(observed.drawings[-1].drawn[-1].images, to_uint8(expected))
    assert observed.showpiece is not None
    assert observed.showpiece.stage.name == "truncated"
    assert observed.showpiece.examples is not None
    assert observed.showpiece.examples.shape == (10, 10, 1, 8, 8)


def test_a_diverged_model_says_so(fair_run: Path, tmp_path: Path) -> None:
    shutil.copytree(fair_run, tmp_path / "run")
    weights = tmp_path / "run" / "3-truncated" / "model" / "model.safetensors"
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(weights).items()}, weights)
    observed = observe_run(read_run(tmp_path / "run"))
    assert "NaN" in str(observed.drawings[-1].problem)
    assert observed.drawings[0].problem is None
    assert observed.showpiece is None


def test_the_result_is_the_last_model_that_is_not_a_baseline(fair_run: Path) -> None:
    run = read_run(fair_run)
    _, consistency, continued, truncated = run.stages
    baseline = replace(continued, spec=continued.spec.model_copy(update={"baseline": True}))
    assert shown_stage(replace(run, stages=[consistency, truncated, continued])) == continued
    assert shown_stage(replace(run, stages=[consistency, truncated, baseline])) == truncated
    assert shown_stage(replace(run, stages=[baseline])) == baseline
    assert resolve("demo").stages["continued"].baseline


def test_a_stage_that_ends_below_pure_noise_is_not_sampled(fair_run: Path, tmp_path: Path) -> None:
    shutil.copytree(fair_run, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('t_high = "none"', "t_high = 1.0", 1))
    run = read_run(tmp_path / "run")
    assert [stage.generates for stage in run.stages] == [True, False, True, True]
    observed = observe_run(replace(run, stages=run.stages[:2]))
    assert observed.drawings[1].drawn == ()
    assert observed.showpiece is not None
    assert observed.showpiece.stage.name == "diffusion"
