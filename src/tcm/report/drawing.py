"""The pictures of a report, drawn from a run's models: fixed seeds, so that two reports show the same."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tcm.devices import best_device, fp32_products
from tcm.errors import TcmError
from tcm.evaluation.features import weights_hash
from tcm.evaluation.sampling import HEUN_STEPS, Sampling, quantise
from tcm.method.streams import SampleStreams
from tcm.recipes.fields import ConsistencyStage
from tcm.report.runs import RunRecord, StageRecord
from tcm.weights import Model

COLUMNS = 12
CLASSES = 10
PER_CLASS = 10
PATHS = 3
PATH_STEPS = (1, 2, 4)
STRIPS, STRIP_LENGTH = 4, COLUMNS
SAMPLES = 64
TIMING_SECONDS, MOST_TIMING_SECONDS = 0.5, 5.0

Way = Literal["Heun", "one step", "two steps"]
WAYS: dict[Way, Sampling] = {
    "Heun": Sampling(steps=HEUN_STEPS),
    "one step": Sampling(steps=1),
    "two steps": Sampling(steps=2),
}
EVALUATIONS: dict[Way, int] = {"Heun": 2 * HEUN_STEPS - 1, "one step": 1, "two steps": 2}


@dataclass(frozen=True)
class Drawn:
    """One way of sampling one model: the images of the report's seeds, and how fast they come."""

    way: Way
    described: str
    images: Tensor
    images_per_second: float


@dataclass(frozen=True)
class PathFromNoise:
    """A few samples on their way: `inputs` and `outputs` [steps, n, C, H, W] at each of `times`."""

    times: list[float]
    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class StageDrawings:
    """What a stage's model gives; `problem` says why it gives nothing."""

    stage: StageRecord
    problem: str | None = None
    hash: str = ""
    parameters: int = 0
    drawn: tuple[Drawn, ...] = ()


@dataclass(frozen=True)
class Showpiece:
    """More pictures of the run's best model: the last truncated one, or else the last one that there is."""

    stage: StageRecord
    way: Way
    samples: Tensor
    classes: list[int]
    per_class: Tensor | None
    paths: list[PathFromNoise]
    interpolations: Tensor | None
    strip_classes: list[int]


@dataclass(frozen=True)
class ObservedRun:
    """A run's folder and the pictures of its models: all that a report shows."""

    record: RunRecord
    drawings: list[StageDrawings]
    showpiece: Showpiece | None


@fp32_products("ieee")
def observe_run(record: RunRecord) -> ObservedRun:
    """Draw the pictures of each finished stage; a model that gives none says why."""
    drawings: list[StageDrawings] = []
    chosen = shown_stage(record)
    showpiece = None
    for stage in record.stages:
        if stage.status != "finished":
            continue
        try:
            model = Model.load(stage.model).to(best_device())
            drawings.append(_stage_drawings(stage, model))
            if stage == chosen:
                showpiece = _showpiece(stage, model)
        except TcmError as error:
            drawings.append(StageDrawings(stage, str(error)))
    return ObservedRun(record, drawings, showpiece)


def shown_stage(record: RunRecord) -> StageRecord | None:
    """The stage whose model is the run's result so far."""
    finished = [stage for stage in record.stages if stage.status == "finished" and ways_of(stage)]
    truncated = [stage for stage in finished if stage.spec.objective == "truncated"]
    best = truncated or finished
    return best[-1] if best else None


def ways_of(stage: StageRecord) -> tuple[Way, ...]:
    """How a stage's model is sampled; one that ends below T has learnt nothing about pure noise, and is not."""
    if isinstance(stage.spec, ConsistencyStage) and stage.spec.t_high is not None:
        return ()
    return ("Heun",) if stage.spec.objective == "diffusion" else ("one step", "two steps")


def spread_classes(classes: int, count: int) -> list[int] | None:
    """`count` classes from first to last, each once before any twice; None for a model without classes.

    >>> spread_classes(10, 4), spread_classes(3, 4), spread_classes(0, 4)
    ([0, 2, 5, 7], [0, 1, 2, 0], None)
    """
    if classes == 0:
        return None
    return [i * classes // count if classes >= count else i % classes for i in range(count)]


def _stage_drawings(stage: StageRecord, model: Model) -> StageDrawings:
    return StageDrawings(
        stage,
        hash=weights_hash(model.denoiser.state_dict()),
        parameters=sum(parameter.numel() for parameter in model.denoiser.parameters()),
        drawn=tuple(_draw(model, way) for way in ways_of(stage)),
    )


def _draw(model: Model, way: Way) -> Drawn:
    sampling = WAYS[way]
    labels = spread_classes(model.card.classes, COLUMNS)
    model.sample(1, steps=1)  # the first call of a network is slow
    start = time.perf_counter()
    images = model.sample(steps=sampling.steps, seeds=range(COLUMNS), labels=labels)
    seconds, count = time.perf_counter() - start, COLUMNS
    if seconds * SAMPLES / COLUMNS < MOST_TIMING_SECONDS:
        seconds, count = 0.0, 0
        while seconds < TIMING_SECONDS:
            start = time.perf_counter()
            model.sample(SAMPLES, steps=sampling.steps)
            seconds, count = seconds + time.perf_counter() - start, count + SAMPLES
    return Drawn(way, sampling.describe(model), quantise(images), count / seconds)


def _showpiece(stage: StageRecord, model: Model) -> Showpiece:
    way = ways_of(stage)[0]
    steps, classes = WAYS[way].steps, model.card.classes
    rows = spread_classes(classes, min(classes, CLASSES)) or []
    per_class = None
    if rows:
        labels = [label for label in rows for _ in range(PER_CLASS)]
        images = quantise(model.sample(steps=steps, seeds=range(len(labels)), labels=labels))
        per_class = images.view(len(rows), PER_CLASS, *model.card.image_shape)
    consistent = model.card.kind != "diffusion"
    return Showpiece(
        stage,
        way,
        quantise(model.sample(SAMPLES, steps=steps, seed=1000)),
        rows,
        per_class,
        [path_from_noise(model, steps) for steps in PATH_STEPS] if consistent else [],
        interpolate(model) if consistent else None,
        spread_classes(classes, STRIPS) or [],
    )


@torch.no_grad()
def path_from_noise(model: Model, steps: int) -> PathFromNoise:
    """What the model is given and what it returns at each of `steps` steps: the last outputs are `model.sample`'s."""
    f, times = model.denoiser, model.times(steps)
    device = next(f.parameters()).device
    streams = SampleStreams(range(PATHS))
    labels = _labels(model, PATHS)
    x = torch.zeros(PATHS, *f.image_shape, device=device)
    inputs, outputs = [], []
    for t in times:
        noisy = x + t * streams.normal(f.image_shape).to(device)
        x = f(noisy, torch.full((PATHS,), t), labels)
        inputs.append(quantise((noisy / (1 + t**2) ** 0.5).cpu()))
        outputs.append(quantise(x.cpu()))
    return PathFromNoise(times, torch.stack(inputs), torch.stack(outputs))


@torch.no_grad()
def interpolate(model: Model) -> Tensor:
    """One step from noises on the arc between two, T (cos α ε₀ + sin α ε₁): uint8 [strips, length, C, H, W]."""
    f = model.denoiser
    device = next(f.parameters()).device
    ends = SampleStreams(range(2 * STRIPS)).normal(f.image_shape).view(STRIPS, 2, *f.image_shape)
    angle = torch.linspace(0, torch.pi / 2, STRIP_LENGTH).view(-1, 1, 1, 1)
    # cos² + sin² = 1: a mixture of two independent standard normal noises is one too.
    eps = angle.cos() * ends[:, :1] + angle.sin() * ends[:, 1:]
    labels = _labels(model, STRIPS)
    strips = []
    for row, noise in enumerate(eps.to(device)):
        label = None if labels is None else labels[row].expand(STRIP_LENGTH)
        t = torch.full((STRIP_LENGTH,), model.card.t_max)
        strips.append(quantise(f(model.card.t_max * noise, t, label).cpu()))
    return torch.stack(strips)


def _labels(model: Model, count: int) -> Tensor | None:
    classes = spread_classes(model.card.classes, count)
    return None if classes is None else torch.tensor(classes, device=next(model.denoiser.parameters()).device)
