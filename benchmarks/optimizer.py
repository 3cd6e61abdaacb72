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
    training = trainer(case.recipe(), "consistency")
    parameters = list(training.student.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    average = Average(training.student, ConstantDecay())
    runs = {
        "RAdam (the recipe's)": training.learner.optimizer.step,
        "RAdam of torch, foreach": RAdam(parameters, foreach=True).step,
        "RAdam of torch, one tensor at a time": RAdam(parameters, foreach=False).step,
        "Adam, fused": Adam(parameters, fused=True).step,
        "average, foreach": lambda: average.update(training.student, 1),
        "gradient norm, foreach": training.learner.clip,
    }
    interleave(settings, runs, rounds=5)  # RAdam's first five steps are cheaper
    times = interleave(settings, {"step": steps(case, "consistency")} | runs, rounds=5)
    step = times.pop("step")
    rows = [seconds(f"{case.size}: training step", step)]
    rows += [share(f"{name}, of the step", values, step) for name, values in times.items()]
    ours = ("RAdam (the recipe's)", "average, foreach", "gradient norm, foreach")
    together = [sum(three) for three in zip(*(times[name] for name in ours), strict=True)]
    return [*rows, share("the recipe's optimiser, average and norm together, of the step", together, step, "≤ 3 %")]
