"""Learning rates against the golden numbers, optimisers against torch's own first step."""

from math import sqrt
from pathlib import Path

import pytest
import torch
from inprocess import begin, train, unchanged
from launching import lines, tiny_recipe

from tcm.recipes.lineage import offset_of
from tcm.recipes.resolve import resolve
from tcm.recipes.stages import Stage
from tcm.recipes.stages.diffusion import DiffusionStage
from tcm.training.optimizers import build_optimizer


def stage(**keys: object) -> Stage:
    return DiffusionStage(steps=1000, batch=8, **{"learning_rate": 1e-3} | keys)


def test_inverse_square_root(numbers: dict) -> None:
    for case in numbers["inverse_sqrt_lr"]:
        scheduled = stage(learning_rate=case["ref_lr"], schedule="inverse_sqrt", schedule_reference=case["ref_iter"])
        assert scheduled.rate(case["iteration"]) == pytest.approx(case["lr"], rel=1e-12)


def test_stage_2_of_imagenet_continues_the_schedule_of_stage_1() -> None:
    """5e-4/√(150,000/8000) = 1.15e-4 at its first step: without an offset it would be 4.3 times as much."""
    recipe = resolve("imagenet64-s")
    spec, offset = recipe.stages["truncated"], offset_of(recipe, "truncated")
    assert spec.rate(0, offset) == pytest.approx(1.1547e-4, rel=1e-4)
    assert spec.rate(119_999, offset) == pytest.approx(5e-4 / sqrt(269_999 / 8000))
    assert spec.rate(0) / spec.rate(0, offset) == pytest.approx(4.33, abs=0.01)


def test_a_run_continues_its_schedule(tmp_path: Path) -> None:
    """`continue` counts all stages that led here; warm-up is the stage's own."""
    decay = ("schedule=inverse_sqrt", "schedule_reference=3", "warmup=1")
    words = [f"{stage}.{word}" for stage in ("consistency", "truncated") for word in decay]
    offsets = ("consistency.schedule_offset=5", "truncated.schedule_offset=continue")
    train(tiny_recipe(4, *words, *offsets), tmp_path / "run")
    for folder, offset in (("1-consistency", 5), ("2-truncated", 5 + 4)):
        rates = [line["learning_rate"] for line in lines(tmp_path / "run" / folder) if "loss" in line]
        assert rates == pytest.approx([4e-3 / sqrt((offset + step) / 3) for step in (1, 3)])


@pytest.mark.parametrize("offset", [0, 150_000])
def test_a_power_average_counts_from_the_offset(tmp_path: Path, offset: int) -> None:
    """θ̄ = β θ̄ + (1 − β) θ with β = (1 − 1/i)^(γ + 1) at i = offset + 1."""
    loop, _ = begin(tmp_path, "diffusion", unchanged, "diffusion.averages=[{kind='power', gamma=6.94}]")
    trainer, learner = loop.trainer, loop.trainer.learner
    learner.schedule_offset = offset
    before = {name: tensor.double() for name, tensor in learner.averages[0].state_dict().items()}
    trainer.step(0, loop.batches.at(0))
    beta = (1 - 1 / (offset + 1)) ** 7.94
    assert beta == pytest.approx(0.99994707 if offset else 0.0, abs=1e-8)
    moved = 0
    for name, parameter in trainer.student.named_parameters():
        expected = beta * before[name] + (1 - beta) * parameter.detach().double()
        torch.testing.assert_close(learner.averages[0].state_dict()[name].double(), expected, rtol=0, atol=1e-6)
        moved += not torch.equal(parameter.detach().double(), before[name])
    assert moved > 10


def test_warmup_rises_to_the_rate_and_stays() -> None:
    rates = [stage(warmup=4).rate(step) for step in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize(
    ("name", "plain"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("radam", torch.optim.RAdam)],
)
def test_steps_as_torch_does(name: str, plain: type[torch.optim.Optimizer]) -> None:
    """State that is allocated in advance, so that a checkpoint can be read into it, changes nothing."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    mine = build_optimizer(stage(optimizer=name, betas=(0.9, 0.99), weight_decay=0.01), [ours])
    extra = {"decoupled_weight_decay": True} if name == "radam" else {}
    reference = plain([theirs], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, **extra)
    for step in range(8):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = (parameter.detach() + step) ** 2
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
