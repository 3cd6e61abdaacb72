"""Optimiser and averages at 55.7 M parameters, as a share of the training step."""

import torch
from torch.optim import Adam, RAdam

from benchmarks.cases import ddpmpp, trainer
from benchmarks.harness import Row, Settings, interleave, seconds, share
from benchmarks.stages import steps
from tcm.method.averaging import Average, ConstantDecay

TITLE = "optimiser and averages at 55.7 M parameters"


def measure(settings: Settings) -> list[Row]:
    case = ddpmpp(settings)
    step = interleave(settings, {"step": steps(case, "consistency")}, 1)["step"]
    training = trainer(case.recipe(), "consistency")
    parameters = list(training.student.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    average = Average(training.student, ConstantDecay())
    runs = {
        "RAdam (the recipe's)": training.optimizer.step,
        "RAdam of torch, foreach": RAdam(parameters, foreach=True).step,
        "RAdam of torch, one tensor at a time": RAdam(parameters, foreach=False).step,
        "Adam, fused": Adam(parameters, fused=True).step,
        "average, foreach": lambda: average.update(training.student, 1),
        "gradient norm, foreach": training._clip,
    }
    times = interleave(settings, runs, rounds=5, warm=6)  # RAdam's first five steps are cheaper
    rows = [seconds(f"{case.size}: training step", step)]
    rows += [share(f"{name}, of the step", values, step) for name, values in times.items()]
    together = [sum(three) for three in zip(*(times[name] for name in list(runs)[:1] + list(runs)[4:]), strict=True)]
    return [*rows, share("the recipe's optimiser, average and norm together, of the step", together, step, "≤ 3 %")]
