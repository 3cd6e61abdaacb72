"""What a precision's rounding does to a stage: its gradient and its pairs compared with those of IEEE fp32.

The consistency loss is a small difference of two large outputs, so that rounding which a diffusion model never notices
may be all that is left of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cosine_similarity

from tcm.data.loader import BatchSource, LoadedBatch
from tcm.foundation.errors import TcmError
from tcm.method.distances import Distance
from tcm.recipes.stages.base import Precision
from tcm.training.metrics import TIME_BINS
from tcm.training.precision import arithmetic, products
from tcm.training.trainer import Trainer

SAMPLES, BATCHES = 256, 3
"""How many samples are looked at, at least, and how many batches."""

FEWEST = 8
"""A bin with fewer pairs than this tells nothing."""

EQUAL = 16 * torch.finfo(torch.float32).eps
"""Outputs that differ by less than this, relative to their size, are equal: networks round as the batch is split."""

GOOD, LEAST = 0.9, 0.5
"""Cosines below GOOD are worth a warning; a stage with one below LEAST learns mostly from rounding."""


@dataclass(frozen=True)
class Rounding:
    """Cosines with IEEE fp32: of the gradient, and the mean of those of f(x_t) − f(x_r) in each bin of t.

    1 means that rounding does nothing. A bin with too few pairs has none, nor has a diffusion stage.
    """

    precision: Precision
    gradient: float
    pairs: tuple[float | None, ...] = ()

    @property
    def lowest(self) -> float:
        """The worst of all."""
        return min([self.gradient, *(cosine for cosine in self.pairs if cosine is not None)])

    def describe(self, bin_edges: Tensor) -> str:
        """All cosines in one line."""
        cosines = dict(zip(bin_names(bin_edges), self.pairs, strict=False))
        bins = [f"{cosine:.2f} ({name})" for name, cosine in cosines.items() if cosine is not None]
        pairs = f"; of f(x_t) − f(x_r) {', '.join(bins)}" if bins else ""
        return f"cosines of {self.precision} with IEEE fp32: of the gradient {self.gradient:.2f}{pairs}"

    def line(self) -> dict[str, object]:
        """For metrics.jsonl."""
        found: dict[str, object] = {"step": 0, "precision": self.precision, "gradient_cosine": self.gradient}
        return found | ({"pair_cosine_by_t": list(self.pairs)} if self.pairs else {})


def bin_names(bin_edges: Tensor) -> list[str]:
    """The names of the bins of t.

    >>> bin_names(torch.tensor([0.1, 1.0, 10.0]))
    ['t 0.1 to 1', 't 1 to 10']
    """
    return [f"t {low:.2g} to {high:.2g}" for low, high in pairwise(bin_edges.tolist())]


def read_rounding(lines: Sequence[dict[str, Any]]) -> Rounding | None:
    """The record of it in the lines of a metrics.jsonl."""
    found = [line for line in lines if "gradient_cosine" in line]
    if not found:
        return None
    line = found[-1]
    return Rounding(line["precision"], line["gradient_cosine"], tuple(line.get("pair_cosine_by_t", ())))


def measure_rounding(trainer: Trainer, batches: BatchSource) -> Rounding:
    """Compare the stage's precision with IEEE fp32 on its first batches, at its last and tightest ratio.

    Neither weights nor random numbers of the run change, and all processes find the same.
    """
    gradients: list[float] = []
    sums = torch.zeros(2 * TIME_BINS)
    precision = trainer.stage.precision
    count = max(BATCHES, -(-SAMPLES // trainer.stage.batch))
    with torch.compiler.set_stance("force_eager"):
        for loaded in islice(batches.starting_at(0), count):
            exact, rounded = _observe(trainer, "fp32", loaded), _observe(trainer, precision, loaded)
            gradients.append(_gradient_cosine(trainer, exact, rounded))
            if exact.differences:
                sums += _pairs_by_time(trainer, exact, rounded)
    totals, counts = trainer.processes.sum(sums.to(trainer.processes.device)).cpu().chunk(2)
    pairs = [float(total / n) if n >= FEWEST else None for total, n in zip(totals, counts, strict=True)]
    return Rounding(precision, sum(gradients) / count, tuple(pairs) if counts.any() else ())


def refuse_rounding(stage: str, rounding: Rounding) -> None:
    """Refuse a precision in which a stage would learn mostly from rounding."""
    if rounding.lowest < LEAST:
        raise TcmError(
            f"{stage}.precision={rounding.precision!r} leaves mostly rounding error: its lowest cosine with IEEE fp32 "
            f"is {rounding.lowest:.2f}, below {LEAST}; use precision='fp32', or accept_rounding=true to train anyway"
        )


@dataclass(frozen=True)
class _Observed:
    gradient: list[Tensor]
    differences: list[Tensor]
    times: list[Tensor]


def _observe(trainer: Trainer, precision: Precision, loaded: LoadedBatch) -> _Observed:
    """The gradient of a batch's loss, and f(x_t) − f(x_r) of its pairs, in a precision."""
    step, device, student = trainer.stage.steps - 1, trainer.processes.device, trainer.student
    differences: list[Tensor] = []
    objective = trainer.objective.comparing_by(lambda distance: _Watched(distance, differences))
    times = []
    # Half as many rows at once as in training: in fp32 they take as much memory.
    parts = min(2 * trainer.stage.accumulation, len(loaded.images))
    with products(precision):
        for micro, _ in trainer.micro_batches(loaded, parts):
            with arithmetic(trainer.stage, trainer.models, precision, device):
                losses = objective.loss(trainer.models, micro, step, trainer.streams(step, micro))
            torch.autograd.backward(losses.total * trainer.learner.scaler.get_scale() * trainer.processes.count)
            times.append(losses.t)
    gradient = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    student.zero_grad(set_to_none=True)
    if not trainer.learner.sharded:
        gradient = [trainer.processes.sum(part) for part in gradient]
    return _Observed([part.to_local() if isinstance(part, DTensor) else part for part in gradient], differences, times)


@dataclass(frozen=True)
class _Watched(Distance):
    """A distance that also keeps the differences it is given, in `seen`; 0 for what fp32 itself rounds to."""

    distance: Distance
    seen: list[Tensor]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            difference = (x - y).flatten(1)
            equal = difference.norm(dim=1) <= EQUAL * x.flatten(1).norm(dim=1)
            self.seen.append(difference.masked_fill(equal[:, None], 0.0))
        return self.distance(x, y)


def _gradient_cosine(trainer: Trainer, exact: _Observed, rounded: _Observed) -> float:
    """⟨a, b⟩/(‖a‖ ‖b‖); 0 if rounding made it overflow or vanish."""
    products = torch.zeros(3)
    for a, b in zip(exact.gradient, rounded.gradient, strict=True):
        products += torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]).cpu()
    if trainer.learner.sharded:
        products = trainer.processes.sum(products.to(trainer.processes.device)).cpu()
    both, one, other = products.double().tolist()
    cosine = both / (one * other) ** 0.5 if one * other > 0 else 0.0
    return cosine if abs(cosine) <= 2 else 0.0


def _pairs_by_time(trainer: Trainer, exact: _Observed, rounded: _Observed) -> Tensor:
    """The sums of the pairs' cosines by t, then their numbers.

    A pair without a difference has nothing to lose: with tangents, the student still is the frozen model at t'.
    """
    differences = torch.cat(exact.differences)
    cosines = cosine_similarity(differences, torch.cat(rounded.differences), eps=0.0).nan_to_num(0.0)
    differ = differences.any(1).cpu()
    where = torch.bucketize(torch.cat(exact.times).cpu(), trainer.bin_edges[1:-1])[differ]
    sums = torch.zeros(TIME_BINS).index_add_(0, where, cosines.float().cpu()[differ])
    return torch.cat([sums, torch.bincount(where, minlength=TIME_BINS).float()])
