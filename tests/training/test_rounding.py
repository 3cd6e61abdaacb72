"""What a precision other than fp32 does to a stage is measured when it begins, and refused where it drowns the rest."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import begin, events, train, unchanged
from launching import Launcher, lines, tiny, tiny_recipe
from torch.nn.functional import cosine_similarity

import tcm
from tcm.data import to_float
from tcm.foundation.errors import TcmError
from tcm.method.objectives import Consistency
from tcm.method.preconditioning import column
from tcm.recipes.resolve import resolve
from tcm.training.metrics import TIME_BINS
from tcm.training.rounding import BATCHES, FEWEST, Rounding, measure_rounding, read_rounding
from tcm.training.run import RunOptions
from tcm.training.stage_loop import StageLoop

STAGE_1 = ('order=["consistency"]', "consistency.teacher=none", "consistency.curriculum.d=0", "network.dropout=0.0")
HARD = (*STAGE_1, "consistency.curriculum.limit=0.999", "consistency.sample_every=0", "consistency.batch=96")


def noise_line(folder: Path) -> dict[str, Any]:
    (line,) = [line for line in lines(folder) if "gradient_cosine" in line]
    return line


def trained_loop(folder: Path, *overrides: str) -> StageLoop:
    """Stage 1 with the weights of the digits model that comes with the package."""
    shipped = tcm.load("digits")
    network = [f"network.channels={shipped.card.network.channels}", "sigma_data=0.75", "t_max=80.0"]
    loop, _ = begin(folder, "consistency", unchanged, *network, *HARD, *overrides)
    loop.trainer.student.load_state_dict(shipped.denoiser.state_dict())
    return loop


def test_against_a_calculation_by_hand(tmp_path: Path) -> None:
    """f(x_t) − f(x_r) of every sample, in fp32 and in bf16, without the objective's loss."""
    loop = trained_loop(tmp_path, "consistency.precision=bf16", "consistency.accumulation=3")
    trainer = loop.trainer
    f, objective, step = trainer.student, trainer.objective, trainer.stage.steps - 1
    assert isinstance(objective, Consistency)
    cosines, times = [], []
    # As many rows at once as are measured: kernels for bf16 may round another way for another number of them.
    for number, rows in product(range(BATCHES), range(6)):
        loaded = loop.batches.at(number)
        x, micro = to_float(loaded.images)[rows::6], [one for one, _ in trainer.micro_batches(loaded, 6)][rows]
        draw = objective.draw(trainer.models, micro, step, trainer.streams(step, micro))
        r = draw.t - objective.pairs.curriculum.delta(draw.t, step)
        found = []
        for half in (False, True):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                both = [f(x + column(at, x) * draw.eps, at, micro.condition) for at in (draw.t, r)]
            found.append((both[0] - both[1]).flatten(1))
        cosines.append(cosine_similarity(*found))
        times.append(draw.t)
    t, cosine = torch.cat(times), torch.cat(cosines)
    rounding = measure_rounding(trainer, loop.batches)
    assert len(rounding.pairs) == TIME_BINS
    for low, high, measured in zip(trainer.bin_edges, trainer.bin_edges[1:], rounding.pairs, strict=False):
        inside = (t > low) & (t <= high)
        assert (measured is not None) == (int(inside.sum()) >= FEWEST)
        if measured is not None:
            assert measured == pytest.approx(float(cosine[inside].mean()), abs=0.01)
    assert sum(measured is not None for measured in rounding.pairs) >= 6
    assert rounding.lowest < 0.3
    assert -0.5 < rounding.gradient < 0.9


def test_the_gradient_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    loop = trained_loop(tmp_path, "consistency.precision=bf16")
    trainer = loop.trainer
    step, cosines = trainer.stage.steps - 1, []
    for number in range(BATCHES):
        found = []
        for half in (False, True):
            trainer.student.zero_grad()
            for micro, _ in trainer.micro_batches(loop.batches.at(number), 2):
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    losses = trainer.objective.loss(trainer.models, micro, step, trainer.streams(step, micro))
                torch.autograd.backward(losses.total)
            found.append(torch.cat([p.grad.flatten() for p in trainer.student.parameters() if p.grad is not None]))
        cosines.append(float(cosine_similarity(*found, dim=0)))
    trainer.student.zero_grad()
    assert measure_rounding(trainer, loop.batches).gradient == pytest.approx(sum(cosines) / BATCHES, abs=0.01)


def test_equal_arithmetic_has_cosines_of_one(tmp_path: Path) -> None:
    """A CPU without TF32 computes tf32 as fp32: nothing but the precision may differ between the two passes."""
    (tmp_path / "small").mkdir()
    loop, _ = begin(
        tmp_path / "small", "truncated", unchanged, "truncated.precision=tf32", "truncated.teacher=none",
        "truncated.t_prime=0.5", "network.dropout=0.3",
    )  # fmt: skip
    trainer = loop.trainer
    trainer.student.t_min = 0.002  # it plays the frozen model too
    trainer.models = {"student": trainer.student, "frozen": trainer.student}
    rounding = measure_rounding(trainer, loop.batches)
    assert rounding.gradient == pytest.approx(1, abs=1e-5)
    assert [cosine for cosine in rounding.pairs if cosine is not None] == pytest.approx(
        [1.0] * sum(cosine is not None for cosine in rounding.pairs), abs=1e-5
    )


def test_tangents_have_no_difference_to_lose(tmp_path: Path) -> None:
    """Where a difference in bf16 is mostly rounding, the derivative keeps its direction, and so does the gradient."""
    loop = trained_loop(tmp_path, "consistency.precision=bf16", "consistency.target=tangent")
    rounding = measure_rounding(loop.trainer, loop.batches)
    assert rounding.lowest > 0.95
    assert sum(cosine is not None for cosine in rounding.pairs) >= 6
    assert loop.trainer.student.network.arithmetic is None


def test_nothing_is_disturbed(tmp_path: Path) -> None:
    """Weights, moments, averages, the global generator: and the next step is that of a run which did not measure."""
    records = []
    for name in ("measured", "not"):
        (tmp_path / name).mkdir()
        loop = trained_loop(tmp_path / name, "consistency.precision=fp16", "consistency.dropout=0.2")
        before = {key: tensor.clone() for key, tensor in loop.trainer.tensors().items()}
        state, position = torch.get_rng_state(), loop.trainer.position(0)
        if name == "measured":
            measure_rounding(loop.trainer, loop.batches)
        assert torch.equal(torch.get_rng_state(), state)
        assert loop.trainer.position(0) == position
        assert all(torch.equal(before[key], tensor) for key, tensor in loop.trainer.tensors().items())
        assert all(parameter.grad is None for parameter in loop.trainer.student.parameters())
        records.append((loop.trainer.step(0, loop.batches.at(0)), loop.trainer.tensors()))
    assert records[0][0] == records[1][0]
    assert all(torch.equal(tensor, records[1][1][key]) for key, tensor in records[0][1].items())


def test_a_refused_stage_and_its_remedies(tmp_path: Path) -> None:
    """Nothing is lost: the same command with the remedy resumes in the same folder, where other changes are refused."""
    run, stage = tmp_path / "run", tmp_path / "run" / "1-consistency"
    words = ["t_max=80.0", "sigma_data=0.75", *HARD]
    options = RunOptions(init="digits")
    with pytest.raises(TcmError) as error:
        train(tiny_recipe(2, *words, "consistency.precision=bf16"), run, options)
    rounding = read_rounding(lines(stage))
    assert rounding is not None
    assert str(error.value) == (
        f"consistency.precision='bf16' leaves mostly rounding error: its lowest cosine with IEEE fp32 is "
        f"{rounding.lowest:.2f}, below 0.5; use precision='fp32', or accept_rounding=true to train anyway"
    )
    accepted = tiny_recipe(2, *words, "consistency.precision=bf16", "consistency.accept_rounding=true")
    printed = train(accepted, run, options)
    assert "cosines of bf16 with IEEE fp32: of the gradient" in printed
    assert [event["event"] for event in events(stage)] == ["rounding"]
    assert noise_line(stage)["precision"] == "bf16"
    assert resolve(str(run / "recipe.toml")) == accepted
    with pytest.raises(TcmError, match=r"was started with another recipe \(consistency.precision"):
        train(tiny_recipe(2, *words), run, options)


def test_fp32_is_the_other_remedy(tmp_path: Path) -> None:
    words = ["t_max=80.0", "sigma_data=0.75", *HARD]
    with pytest.raises(TcmError, match="leaves mostly rounding error"):
        train(tiny_recipe(2, *words, "consistency.precision=bf16"), tmp_path / "run", RunOptions(init="digits"))
    train(tiny_recipe(2, *words), tmp_path / "run", RunOptions(init="digits"))
    assert all("gradient_cosine" not in line for line in lines(tmp_path / "run" / "1-consistency"))


def test_a_resumed_stage_does_not_measure_again(tmp_path: Path) -> None:
    loop, stop = begin(tmp_path, "diffusion", unchanged, "diffusion.precision=bf16", "diffusion.sample_every=0")
    stop.by = "SIGTERM"
    assert not loop.run(stop)
    loop, stop = begin(tmp_path, "diffusion", unchanged, "diffusion.precision=bf16", "diffusion.sample_every=0")
    assert loop.run(stop)
    line = noise_line(tmp_path)
    assert line["gradient_cosine"] > 0.99, "rounding hardly touches a diffusion stage"
    assert "pair_cosine_by_t" not in line
    assert events(tmp_path) == []


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_find_the_same(launcher: Launcher, tmp_path: Path, shard: bool) -> None:
    words = tiny(2, *HARD, "consistency.init=scratch", "consistency.precision=bf16", "consistency.accept_rounding=true")
    arguments = ("train", "digits", *words)
    train(resolve("digits", words), tmp_path / "alone")
    ended = launcher.run_ranks(2, *arguments, "--run", str(tmp_path / "two"), *(["--shard"] if shard else []))
    assert [code for code, _ in ended] == [0, 0], ended
    alone, two = (noise_line(tmp_path / name / "1-consistency") for name in ("alone", "two"))
    assert two["gradient_cosine"] == pytest.approx(alone["gradient_cosine"], abs=0.02)
    for one, other in zip(alone["pair_cosine_by_t"], two["pair_cosine_by_t"], strict=True):
        assert (one is None) == (other is None)
        assert one is None or other == pytest.approx(one, abs=0.1)


def test_lines_come_back(tmp_path: Path) -> None:
    rounding = Rounding("tf32", 0.75, (None, 0.5))
    written = [json.loads(json.dumps(line)) for line in ({"step": 0, "loss": 1.0}, rounding.line())]
    assert read_rounding(written) == rounding
    assert read_rounding(written[:1]) is None
    assert rounding.describe(torch.tensor([0.1, 1.0, 10.0])) == (
        "cosines of tf32 with IEEE fp32: of the gradient 0.75; of f(x_t) − f(x_r) 0.50 (t 1 to 10)"
    )
