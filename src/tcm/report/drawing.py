"""The pictures of a report, drawn from a run's models: fixed seeds, so that two reports show the same."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcm.evaluation.features import weights_hash
from tcm.evaluation.generation import Sampling, quantise
from tcm.foundation.devices import best_device, fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Condition, ConditionKind
from tcm.method.sampling import last
from tcm.report.records import RunRecord, StageRecord
from tcm.weights import Model, load

COLUMNS = 12
EXAMPLES = 10
PER_EXAMPLE = 10
PATHS = 3
PATH_STEPS = (1, 2, 4)
STRIPS, STRIP_LENGTH = 4, COLUMNS
SAMPLES = 64
TIMING_SECONDS, MOST_TIMING_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class Drawn:
    """One way of sampling one model: the images of the report's seeds, and how fast they come."""

    way: str
    steps: int
    evaluations: int
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
    """What a stage's model gives; `problem` says why it gives nothing, or only what is `drawn`."""

    stage: StageRecord
    problem: str | None = None
    hash: str = ""
    parameters: int = 0
    drawn: tuple[Drawn, ...] = ()
    captions: tuple[str, ...] = ()
    """The condition of each of the report's seeds."""


@dataclass(frozen=True)
class Origin:
    """The model that a run starts from, under the run's conditions: the images of each way of sampling it.

    `problem` says why it gives none.
    """

    name: str
    ways: tuple[tuple[str, Tensor], ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Showpiece:
    """More pictures of the run's result: the last model that generates and is not a baseline.

    `examples` has a row of images for each of some conditions, whose `captions` say what they are.
    """

    stage: StageRecord
    way: str
    samples: Tensor
    captions: list[str]
    examples: Tensor | None
    paths: list[PathFromNoise]
    interpolations: Tensor | None
    strip_captions: list[str]


@dataclass(frozen=True)
class ObservedRun:
    """A run's folder and the pictures of its models: all that a report shows."""

    record: RunRecord
    drawings: list[StageDrawings]
    showpiece: Showpiece | None
    origin: Origin | None = None


@fp32_products("ieee")
def observe_run(record: RunRecord) -> ObservedRun:
    """Draw the pictures of each finished stage; a model that gives none says why."""
    drawings: list[StageDrawings] = []
    chosen = shown_stage(record)
    showpiece, kind = None, None
    guidance = sorted({stage.spec.teacher_guidance for stage in record.stages} - {1.0})
    for stage in record.stages:
        if stage.status != "finished":
            continue
        try:
            model = Model.load(stage.model).to(best_device())
            drawings.append(_stage_drawings(stage, model, guidance))
            kind = model.card.condition
        except TcmError as error:
            drawings.append(StageDrawings(stage, str(error)))
            continue
        if stage == chosen:
            try:
                showpiece = _showpiece(stage, model)
            except TcmError as error:
                drawings[-1] = replace(drawings[-1], problem=str(error))
    compared = record.init is not None and any(drawing.drawn for drawing in drawings)
    return ObservedRun(record, drawings, showpiece, _origin(record, kind, guidance) if compared else None)


def shown_stage(record: RunRecord) -> StageRecord | None:
    """The stage whose model is the run's result so far."""
    finished = [stage for stage in record.stages if stage.status == "finished" and stage.generates]
    results = [stage for stage in finished if not stage.spec.baseline] or finished
    return results[-1] if results else None


def _stage_drawings(stage: StageRecord, model: Model, guidance: Sequence[float]) -> StageDrawings:
    ways, kind = _ways(model, guidance), model.card.condition
    return StageDrawings(
        stage,
        hash=weights_hash(model.denoiser.state_dict()),
        parameters=model.parameters,
        drawn=tuple(_draw(way, steps) for way in ways for steps in way.sampler.usual_steps) if stage.generates else (),
        captions=() if kind is None or not stage.generates else tuple(kind.captions(kind.spread(COLUMNS))),
    )


def _ways(model: Model, guidance: Sequence[float]) -> list[Model]:
    """The model as it is and, if it is a diffusion model, with the guidance under which others follow it."""
    ways = [model]
    with suppress(TcmError):  # only a diffusion model can be guided
        ways += [model.guided(scale) for scale in guidance]
    return ways


def _origin(record: RunRecord, kind: ConditionKind | None, guidance: Sequence[float]) -> Origin:
    """What the model given with --init makes of the report's seeds and of the conditions of the run's own models."""
    name = str(record.init)
    try:
        model = load(name).to(best_device())
        device = next(model.denoiser.parameters()).device
        condition = None if kind is None else kind.spread(COLUMNS).to(device)
        made = []
        for way in _ways(model, guidance):
            for steps in way.sampler.usual_steps:
                images = way.sample(steps=steps, seeds=range(COLUMNS), condition=condition)
                made.append((way.sampler.name(steps), quantise(images)))
    except TcmError as error:
        return Origin(name, problem=str(error))
    return Origin(name, tuple(made))


def _draw(model: Model, steps: int) -> Drawn:
    model.sample(1, steps=steps)  # the first call of a network is slow
    start = time.perf_counter()
    images = model.sample(steps=steps, seeds=range(COLUMNS), condition=spread_conditions(model, COLUMNS))
    seconds, count = time.perf_counter() - start, COLUMNS
    if seconds * SAMPLES / COLUMNS < MOST_TIMING_SECONDS:
        seconds, count = 0.0, 0
        while seconds < TIMING_SECONDS:
            start = time.perf_counter()
            model.sample(SAMPLES, steps=steps)
            seconds, count = seconds + time.perf_counter() - start, count + SAMPLES
    sampler, described = model.sampler, Sampling(steps=steps).describe(model)
    return Drawn(sampler.name(steps), steps, sampler.evaluations(steps), described, quantise(images), count / seconds)


def _showpiece(stage: StageRecord, model: Model) -> Showpiece:
    steps, kind = model.sampler.usual_steps[0], model.card.condition
    captions, examples, strip_captions = [], None, []
    if kind is not None:
        shown = kind.examples(EXAMPLES)
        captions, strip_captions = kind.captions(shown), kind.captions(kind.spread(STRIPS))
        rows = torch.arange(len(shown)).repeat_interleave(PER_EXAMPLE)
        images = quantise(model.sample(steps=steps, seeds=range(len(rows)), condition=shown.select(rows)))
        examples = images.view(len(shown), PER_EXAMPLE, *model.card.picture_shape)
    consistent = model.sampler.generates_at_once
    return Showpiece(
        stage,
        model.sampler.name(steps),
        quantise(model.sample(SAMPLES, steps=steps, seed=1000)),
        captions,
        examples,
        paths_from_noise(model) if consistent else [],
        interpolate(model) if consistent else None,
        strip_captions,
    )


def paths_from_noise(model: Model) -> list[PathFromNoise]:
    """In 1, 2 and 4 steps, as far as the sampler accepts them; if it accepts none, in its usual steps."""
    found = []
    for steps in PATH_STEPS:
        with suppress(TcmError):
            found.append(path_from_noise(model, steps))
    return found or [path_from_noise(model, model.sampler.usual_steps[0])]


@torch.no_grad()
def path_from_noise(model: Model, steps: int) -> PathFromNoise:
    """What the model is given and what it returns at each of `steps` steps: the last outputs are `model.sample`'s."""
    streams, condition = SampleStreams(range(PATHS)), spread_conditions(model, PATHS)
    path = list(model.sampler.run(model.denoiser, streams, condition, steps=steps))
    inputs = [quantise(model.pictures(step.x_t / (1 + step.t**2) ** 0.5).cpu()) for step in path]
    outputs = [quantise(model.pictures(step.x).cpu()) for step in path]
    return PathFromNoise([step.t for step in path], torch.stack(inputs), torch.stack(outputs))


@torch.no_grad()
def interpolate(model: Model) -> Tensor:
    """Samples of noises on the arc between two, cos α ε₀ + sin α ε₁: uint8 [strips, length, C, H, W]."""
    f, steps = model.denoiser, model.sampler.usual_steps[0]
    device = next(f.parameters()).device
    ends = SampleStreams(range(2 * STRIPS)).normal(f.image_shape).view(STRIPS, 2, *f.image_shape)
    angle = torch.linspace(0, torch.pi / 2, STRIP_LENGTH).view(-1, 1, 1, 1)
    # cos² + sin² = 1: a mixture of two independent standard normal noises is one too.
    eps = angle.cos() * ends[:, :1] + angle.sin() * ends[:, 1:]
    conditions = spread_conditions(model, STRIPS)
    strips = []
    for row, noise in enumerate(eps):
        same = torch.full((STRIP_LENGTH,), row, device=device)
        condition = None if conditions is None else conditions.select(same)
        streams = SampleStreams([2 * row] * STRIP_LENGTH)
        made = last(model.sampler.run(f, streams, condition, steps=steps, first=noise))
        strips.append(quantise(model.pictures(made).cpu()))
    return torch.stack(strips)


def spread_conditions(model: Model, count: int) -> Condition | None:
    """`count` conditions on the model's device, spread over all there are."""
    device = next(model.denoiser.parameters()).device
    return None if model.card.condition is None else model.card.condition.spread(count).to(device)
