"""What the trainer adds around forward, backward and optimiser: data, times, noise, masks, norm, guard, averages."""

import statistics

import torch

from benchmarks.cases import Case, ddpmpp, images, small, trainer
from benchmarks.harness import Row, Settings, Times, interleave, ratio, share
from tcm.data.pixels import to_float
from tcm.method.objectives import Batch, Consistency
from tcm.method.streams import SampleStreams
from tcm.training.guard import GuardState, judge
from tcm.training.metrics import Window

TITLE = "what the trainer adds to forward, backward and optimiser"


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 2), (small(settings), 3)):
        times = parts(settings, case, rounds)
        added = [name for name in times if name not in ("whole", "bare")]
        rows.append(ratio(f"{case.size}: whole step / bare step", times["whole"], times["bare"]))
        rows += [share(f"{case.size}: {name}", times[name], times["bare"]) for name in added]
        total = 100 * sum(statistics.median(times[name]) for name in added) / statistics.median(times["bare"])
        rows.append(Row(f"{case.size}: sum of the parts", total, "% of the bare step", goal="≤ 2 %"))
    return rows


def parts(settings: Settings, case: Case, rounds: int) -> Times:
    """Seconds of a whole step, of the bare one (same batch, drawn before), and of each thing that the trainer adds."""
    recipe = case.recipe()
    training, batches, window = trainer(recipe, "consistency"), images(recipe, "consistency"), Window()
    objective = training.objective
    assert isinstance(objective, Consistency)
    models, student = training.loss.models, training.student
    loaded = next(batches)

    def streams() -> SampleStreams:
        return SampleStreams([training._sample_seed(0, place) for place in loaded.positions])

    batch = Batch(to_float(loaded.images), loaded.labels if student.classes else None, loaded.positions, case.batch)
    draw = objective.draw(models, batch, streams())
    losses = objective.loss_at(models, batch, 0, draw)

    def whole() -> None:
        batch = next(batches)
        record = training.step(batch.step, batch)
        window.add(record.losses, record.gradient_norm, record.bins, case.batch)

    def bare() -> None:
        training.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(objective.loss_at(models, batch, 0, draw).total)
        training.optimizer.step()

    long = interleave(settings, {"whole": whole, "bare": bare}, rounds)
    short = interleave(
        settings,
        {
            "data": lambda: to_float(next(batches).images),
            "times, noise and masks": lambda: objective.draw(models, batch, streams()),
            "metrics": lambda: (training._bin(losses), window.add({"loss": 0.0}, 1.0, [0.0] * 20, case.batch)),
            "gradient norm": training._clip,
            "guard": lambda: judge(training.stage.guard, GuardState(), 1.0, 1.0),
            "averages": lambda: [average.update(student, 1) for average in training.averages],
        },
        rounds=10,
        warm=2,
    )
    return long | short
