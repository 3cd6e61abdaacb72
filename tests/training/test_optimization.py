"""Learning rates against the golden numbers, optimisers against torch's own first step."""

import pytest
import torch

from tcm.recipes.fields import DiffusionStage, Stage
from tcm.training.optimization import build_optimizer, learning_rate


def stage(**keys: object) -> Stage:
    return DiffusionStage(steps=1000, batch=8, **{"learning_rate": 1e-3} | keys)


def test_inverse_square_root(numbers: dict) -> None:
    for case in numbers["inverse_sqrt_lr"]:
        scheduled = stage(learning_rate=case["ref_lr"], schedule="inverse_sqrt", schedule_reference=case["ref_iter"])
        assert learning_rate(scheduled, case["iteration"]) == pytest.approx(case["lr"], rel=1e-12)


def test_warmup_rises_to_the_rate_and_stays() -> None:
    rates = [learning_rate(stage(warmup=4), step) for step in range(6)]
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
