"""One-step sampling against the bare network's forward pass, and images/s."""

from collections.abc import Callable

import torch

import tcm
from benchmarks.cases import Case, ddpmpp, network_condition, small
from benchmarks.harness import Row, Settings, Times, interleave, ratio, spread
from tcm.evaluation.generation import Sampling, generate, sampling_batch

TITLE = "one-step sampling against the bare network's forward pass"


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 3), (small(settings), 5)):
        model = fresh(case)
        images = batch = 4 if settings.quick else sampling_batch(model)
        times = interleave(settings, runs(model, images, batch), rounds)
        size = f"{case.name}, batch {batch} (the default)"
        rows.append(ratio(f"{size}: sampling / bare forward", times["one step"], times["bare"], "≤ 1.05"))
        rows += [speed(f"{size}: {name}", times, name, images) for name in times]
    return rows


def fresh(case: Case) -> tcm.Model:
    recipe = case.recipe()
    condition = network_condition(recipe)
    return tcm.Model.fresh(
        tcm.ModelCard(kind="consistency", network=recipe.network, image_shape=(3, 32, 32), condition=condition)
    )


def runs(model: tcm.Model, images: int, batch: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(batch, *model.card.image_shape)
    condition = None if model.card.condition is None else model.card.condition.spread(batch)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(0, images, batch):
            model.denoiser.network(x, torch.zeros(batch), condition, None)

    return {
        "bare": bare,
        "one step": lambda: list(generate(model, range(images), Sampling(1), batch)),
        "one step, bf16": lambda: list(generate(model, range(images), Sampling(1, precision="bf16"), batch)),
        "two steps": lambda: list(generate(model, range(images), Sampling(2), batch)),
    }


def speed(what: str, times: Times, name: str, images: int) -> Row:
    return spread(what, [images / seconds for seconds in times[name]], "images/s")
