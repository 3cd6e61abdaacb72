"""Denoising is watched while stage 1 trains: the distance, the rule, and what a run decides by them."""

import json
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inprocess import begin, train
from launching import FOLDERS, Launcher, fingerprint, lines, tiny, tiny_recipe

import tcm
from tcm.data.dataset import ArrayDataset
from tcm.data.loader import Batches
from tcm.foundation.errors import TcmError
from tcm.recipes.decided import noted_decision, settled
from tcm.recipes.resolve import resolve
from tcm.recipes.stages.flattening import FALL, is_flat
from tcm.report.records import read_run
from tcm.training.watching import DenoisingWatch, read_curves, watched_steps

pytestmark = pytest.mark.long

OPEN = ("consistency.steps=40", "consistency.until_flat=true", "truncated.t_prime=auto", "*.sample_every=0")


def open_recipe(*overrides: str) -> list[str]:
    """A tiny run that decides by itself how long stage 1 is and where stage 2 begins."""
    replaced = {override.partition("=")[0] for override in overrides}
    return tiny(8, *(word for word in OPEN if word.partition("=")[0] not in replaced), *overrides)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("decided") / "run"
    train(resolve("digits", open_recipe()), run)
    return run


@pytest.mark.parametrize("t", [0.1, 0.5, 3.0])
def test_the_distance_of_a_known_denoiser(tmp_path: Path, t: float) -> None:
    """A network that gives 0 leaves f(x, t) = c_skip x: components of variance v become c_skip² (v + t²)."""
    loop, _ = begin(tmp_path, "consistency", lambda o: o, "consistency.watched_images=2048", "consistency.batch=2048")
    student = loop.trainer.student
    with torch.no_grad():
        for average in loop.trainer.learner.averages:
            for tensor in average.state_dict().values():
                tensor.zero_()
    x = np.random.default_rng(0).normal(127.5, 30, (2048, 1, 8, 8)).clip(0, 255).astype(np.uint8)
    # Variances that differ, so that the principal components are those of the data, not of chance.
    x = (127.5 + (x - 127.5) * np.linspace(1.0, 0.2, 64).reshape(8, 8)).astype(np.uint8)
    batches = Batches(ArrayDataset(x), seed=0, batch=2048)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    found = DenoisingWatch(loop.trainer, batches, [t]).distances()[t]
    pixels = torch.from_numpy(x).flatten(1).double() / 127.5 - 1
    centre = pixels.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(pixels.T))
    v, mean = values[-8:], vectors[:, -8:].T @ centre
    c = student.sigma_data**2 / (student.sigma_data**2 + t**2)
    exact = (v.sqrt() - c * (v + t**2).sqrt()).square().sum() + ((1 - c) * mean).square().sum()
    assert found == pytest.approx(float(exact), rel=0.1, abs=0.002)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())


curves = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12).map(lambda ds: list(enumerate(ds, start=1)))


@given(curves, st.floats(1e-2, 1e2), st.integers(1, 100))
def test_flatness_has_no_units(curve: list[tuple[int, float]], scale: float, stretch: int) -> None:
    scaled = [(step * stretch, distance * scale) for step, distance in curve]
    assert is_flat(scaled) == is_flat(curve) or scaled[-1][1] == pytest.approx((1 - FALL) * scaled[0][1], rel=1e-6)


@given(st.integers(1, 10**6), st.floats(0.0, 0.2), st.floats(0.3, 3.0))
def test_slow_falls_are_flat_and_fast_ones_are_not(steps: int, slow: float, fast: float) -> None:
    """step^-a falls by 1 - (2/3)^a over the last third: 10 % at a = 0.26, a little more between measured steps."""
    measured = list(watched_steps(steps))
    enough = measured[-1] * 2 / 3 >= measured[0]
    assert is_flat([(step, step**-slow) for step in measured]) == enough
    assert not is_flat([(step, step**-fast) for step in measured])
    assert not is_flat([(step, 1.0) for step in measured[:1]])


@given(st.integers(1, 10**5), st.integers(1, 8))
def test_a_longer_stage_is_watched_at_the_same_steps(steps: int, times: int) -> None:
    """But for the first: no decision of the longer one looks at those."""
    short, long = set(watched_steps(steps)), list(watched_steps(times * steps))
    assert {step for step in long if step <= steps} <= short
    assert all(b - a <= max(1, b / 6) for a, b in pairwise(long))
    assert len(long) < 20


def test_a_run_that_decides_by_itself(decided: Path) -> None:
    first, second = (noted_decision(decided / folder) for folder in FOLDERS[1:])
    assert first is not None
    assert second is not None
    steps, t_prime = first.values["steps"], second.values["t_prime"]
    curve = read_curves(lines(decided / FOLDERS[1]))
    recipe = resolve(str(decided / "recipe.toml"))
    assert recipe.stages["truncated"].t_prime == "auto"
    assert 12 <= steps < 40, "the curriculum is at its limit from step 12 on"
    assert list(curve) == [0.5625, 1.125, 2.25]
    assert is_flat(curve[1.125])
    assert [step for step, _ in curve[1.125]] == [step for step in watched_steps(40) if step <= steps]
    assert not any(is_flat(curve[1.125][: n + 1]) for n, (step, _) in enumerate(curve[1.125]) if 12 <= step < steps)
    assert t_prime == max(t for t in (0.5625, 1.125) if is_flat(curve[t]))
    model = tcm.load(decided / FOLDERS[2] / "model")
    assert (model.card.t_min, model.denoiser.t_min) == (t_prime, t_prime)
    assert tcm.load(decided / FOLDERS[1] / "model").card.provenance.step == steps
    stages = {stage.name: stage for stage in read_run(decided).stages}
    assert stages["consistency"].spec.steps == stages["consistency"].step == steps
    assert stages["truncated"].span[0] == t_prime
    times = stages["truncated"].spec.times
    assert times == recipe.stages["truncated"].times.in_units_of(t_prime)


def test_killed_and_resumed_it_decides_the_same(launcher: Launcher, decided: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["train", "digits", *open_recipe(), "--run", str(run)]
    for seen in ("1-consistency/state/step-8", "1-consistency/decided.json", "2-truncated/decided.json"):
        command = launcher.start(*arguments)
        command.until(lambda seen=seen: (run / seen).exists())
        command.send(signal.SIGKILL)
        command.wait()
    code, text = launcher.run(*arguments)
    assert code == 0, text
    assert fingerprint(run) == fingerprint(decided)
    assert all(lines(run / folder) == lines(decided / folder) for folder in FOLDERS)
    assert [noted_decision(run / f) for f in FOLDERS] == [noted_decision(decided / f) for f in FOLDERS]


@pytest.mark.slow
def test_two_processes_decide_the_same(launcher: Launcher, decided: Path, tmp_path: Path) -> None:
    """Sharded: the distances agree up to rounding."""
    sharded = tmp_path / "sharded"
    ended = launcher.run_ranks(2, "train", "digits", *open_recipe(), "--run", str(sharded), "--shard")
    assert [code for code, _ in ended] == [0, 0], ended
    assert [noted_decision(sharded / f) for f in FOLDERS] == [noted_decision(decided / f) for f in FOLDERS]
    ours, theirs = (read_curves(lines(run / FOLDERS[1])) for run in (sharded, decided))
    for t, curve in theirs.items():
        assert np.array(ours[t]) == pytest.approx(np.array(curve), rel=1e-3)


@pytest.mark.slow
def test_a_worker_for_each_stage_decides_the_same(launcher: Launcher, decided: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, text = launcher.run("train", "digits", *open_recipe(), "--run", str(run), "--workers", "1")
    assert code == 0, text
    assert fingerprint(run) == fingerprint(decided)


def test_a_stage_that_ended_early_is_extended(decided: Path, tmp_path: Path) -> None:
    """The same recipe changes nothing; more steps, without the rule, extend the stage from where it ended."""
    run = tmp_path / "run"
    shutil.copytree(decided, run)
    assert "changes" not in train(resolve("digits", open_recipe()), run)
    assert "changes" not in train(resolve("digits", open_recipe("consistency.steps=50")), run), "only the bound"
    steps = settled(resolve(str(run / "recipe.toml")), run).stages["consistency"].steps
    longer = resolve("digits", open_recipe("consistency.until_flat=false", f"consistency.steps={steps + 2}"))
    shutil.rmtree(run / FOLDERS[2])
    said = train(longer, run)
    assert f"consistency.steps: {steps} → {steps + 2} (extended)" in said
    assert tcm.load(run / FOLDERS[1] / "model").card.provenance.step == steps + 2
    assert (run / FOLDERS[1] / f"model-step-{steps}").is_dir()
    straight = tmp_path / "straight"
    train(tiny_recipe(steps + 2, "diffusion.steps=8", "truncated.steps=1", "*.sample_every=0"), straight)
    assert model_bytes(run) == model_bytes(straight)


def model_bytes(run: Path) -> bytes:
    return (run / FOLDERS[1] / "model" / "model.safetensors").read_bytes()


def test_not_watched(tmp_path: Path, decided: Path) -> None:
    train(tiny_recipe(4, 'order=["diffusion", "consistency"]', "*.sample_every=0"), tmp_path / "no later stage")
    assert read_curves(lines(tmp_path / "no later stage" / FOLDERS[1])) == {}
    run = tmp_path / "run"
    shutil.copytree(decided, run)
    shutil.rmtree(run / FOLDERS[2])
    metrics = run / FOLDERS[1] / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if "denoised_distance" not in json.loads(line)]
    metrics.write_text("\n".join(kept) + "\n")
    with pytest.raises(TcmError, match=r"there are none; set t_prime=1\.125$"):
        train(resolve("digits", open_recipe()), run)
