"""Every stage takes steps on a device that is not the CPU: no tensor is left behind, and the numbers are the CPU's."""

import pytest
import torch
from elsewhere import ELSEWHERE, OtherDevice
from launching import tiny_recipe

from tcm.data import open_dataset
from tcm.data.loader import Batches
from tcm.foundation.processes import Processes
from tcm.method.conditions import Classes
from tcm.recipes.lineage import roles_of
from tcm.training.metrics import time_bins
from tcm.training.stage_models import card_of
from tcm.training.trainer import StepRecord, Trainer
from tcm.weights import Model

# No fused Adam and no generator of random numbers exist for a device that torch does not know.
SETTINGS = ("network.dropout=0.0", "diffusion.optimizer=radam")


def two_steps(stage: str, device: torch.device, *overrides: str) -> list[StepRecord]:
    recipe = tiny_recipe(12, *SETTINGS, *overrides)
    spec = recipe.stages[stage]
    dataset = open_dataset("digits")
    card = card_of(recipe, stage, dataset.shape, dataset.condition_kind)
    torch.manual_seed(0)
    wide = card.model_copy(update={"t_min": recipe.t_min})
    denoisers = [Model.fresh(one).denoiser.to(device) for one in (card, wide, wide)]
    trainer = Trainer(
        spec,
        spec.build(recipe),
        dict(zip(("student", "frozen", "teacher"), denoisers, strict=True)),
        roles_of(recipe, stage),
        Processes(device),
        seed=(recipe.seed, stage),
        bin_edges=time_bins(recipe.t_min, recipe.t_max),
    )
    batches = Batches(dataset, seed=recipe.seed, batch=spec.batch)
    records = [trainer.step(step, batches.at(step)) for step in range(2)]
    assert {tensor.device for name, tensor in trainer.tensors().items() if not name.endswith(".step")} == {device}
    return records


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("diffusion", ["diffusion.label_dropout=0.5"]),
        ("consistency", ["consistency.teacher=none"]),
        ("consistency", ["diffusion.label_dropout=0.5", "consistency.guidance=2.0", "consistency.accumulation=2"]),
        ("truncated", ["truncated.clip=0.5"]),
        ("truncated", ["truncated.teacher=none", "network.kind=edm2", "network.channels=64"]),
    ],
)
def test_steps_on_another_device(stage: str, overrides: list[str]) -> None:
    with OtherDevice():
        elsewhere = two_steps(stage, ELSEWHERE, *overrides)
    here = two_steps(stage, torch.device("cpu"), *overrides)
    for found, expected in zip(elsewhere, here, strict=True):
        assert found.numbers == pytest.approx(expected.numbers, rel=1e-4)
        assert found.bins == pytest.approx(expected.bins, rel=1e-4)


def test_the_device_of_this_test_refuses_to_mix() -> None:
    with OtherDevice(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2).to(ELSEWHERE) + torch.ones(2)


@pytest.mark.parametrize("kind", ["diffusion", "truncated"])
def test_samples_on_another_device(kind: str) -> None:
    recipe = tiny_recipe(12, *SETTINGS)
    model = Model.fresh(card_of(recipe, kind, (1, 8, 8), Classes(10)))
    here = model.sample(3, steps=2, seed=7)
    with OtherDevice():
        elsewhere = model.to(ELSEWHERE).sample(3, steps=2, seed=7)
    torch.testing.assert_close(elsewhere, here)
