"""One stage's state and one step of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tcm.data.loader import LoadedBatch
from tcm.data.pixels import to_float
from tcm.devices import to_device
from tcm.method.averaging import Average
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.method.streams import SampleStreams, derive_seed
from tcm.recipes.fields import Stage
from tcm.recipes.schema import decay_of
from tcm.training.checkpoint import Position
from tcm.training.guard import GuardState, Verdict, judge
from tcm.training.metrics import TIME_BINS
from tcm.training.optimization import build_optimizer, learning_rate
from tcm.training.precision import autocast
from tcm.training.processes import Processes


@dataclass(frozen=True)
class StepRecord:
    """What a step did, the same in every process."""

    losses: dict[str, float]
    gradient_norm: float
    bins: list[float]
    verdict: Verdict
    reason: str
    stop: bool


class LossModule(nn.Module):
    """The objective as a module: one forward pass for each backward pass, as DistributedDataParallel needs it."""

    def __init__(self, objective: Objective, models: Models) -> None:
        super().__init__()
        self.student = models.student
        self.objective, self.models = objective, models

    def forward(self, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        """The objective's losses."""
        return self.objective.loss(self.models, batch, step, streams)


class Trainer:
    """The student of a stage with its optimiser, averages, loss scaling and guard.

    All randomness is a function of (seed, stage, retry, step, place in the global batch).
    """

    def __init__(
        self,
        stage: Stage,
        objective: Objective,
        models: Models,
        processes: Processes,
        seed: tuple[int, str],
        bin_edges: Tensor,
        schedule_offset: int = 0,
    ) -> None:
        self.stage, self.objective, self.processes = stage, objective, processes
        self.seed, self.bin_edges, self.schedule_offset = seed, bin_edges, schedule_offset
        self.models, self.student = models, models.student
        self.loss: nn.Module = LossModule(objective, models)
        self.sharded = isinstance(self.student, FSDPModule)
        if processes.count > 1 and not self.sharded:
            self.loss = DistributedDataParallel(self.loss)
        self.optimizer = build_optimizer(stage, self.student.parameters())
        self.averages = [Average(self.student, decay_of(spec)) for spec in stage.averages]
        self.scaler = GradScaler(
            processes.device.type, init_scale=16.0, growth_interval=20_000, enabled=stage.precision == "fp16"
        )
        self.guard = GuardState()
        self.retry = 0
        self._settled = processes.count < 3 or self.sharded

    def step(self, step: int, loaded: LoadedBatch, stop: bool = False) -> StepRecord:
        """One update: loss, backward, clip, optimiser, averages. The guard decides whether it is made."""
        self.student.network.normalize_weights()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.stage, step, self.schedule_offset)
        if not self._settled:
            # DistributedDataParallel orders its buckets by the first backward pass, and the order in which three or
            # more processes sum depends on them: without this, the first step after a resume would round differently.
            self._backward(step, loaded, stop)
            self._settled = True
        self.optimizer.zero_grad(set_to_none=True)
        names, values = self._backward(step, loaded, stop)
        self.scaler.unscale_(self.optimizer)
        # The one copy back from the device: the guard has to see the numbers before the update.
        *numbers, stops, gradient_norm = torch.cat([values, self._clip()]).tolist()
        losses, bins, stop = dict(zip(names, numbers, strict=False)), numbers[len(names) :], stops > 0
        self.guard, verdict, reason = judge(self.stage.guard, self.guard, losses["loss"], gradient_norm)
        if verdict == "good":
            self.scaler.step(self.optimizer)
            for average in self.averages:
                average.update(self.student, self.schedule_offset + step + 1)
        self.scaler.update()
        return StepRecord(losses, gradient_norm, bins, verdict, reason, stop)

    def _backward(self, step: int, loaded: LoadedBatch, stop: bool) -> tuple[list[str], Tensor]:
        """Gradients of the global batch's loss.

        Returns the names of the loss and its parts, and their values, followed by the loss by t and the number of
        processes that want to stop, all summed over the processes.
        """
        names: list[str] = []
        shares = []
        for micro, last in self.micro_batches(loaded, self.stage.accumulation):
            with self._synchronising(last):
                with autocast(self.stage.precision, self.processes.device):
                    losses: Losses = self.loss(micro, step, self.streams(step, micro))
                # Every process holds its share of a sum, and the gradients are averaged over processes.
                torch.autograd.backward(self.scaler.scale(losses.total * self.processes.count))
            names = ["loss", *losses.parts]
            parts = torch.stack([losses.total.detach(), *losses.parts.values()]).float()
            shares.append(torch.cat([parts, self._bin(losses)]))
        wants_stop = torch.full((1,), float(stop), device=self.processes.device)
        return names, self.processes.sum(torch.cat([torch.stack(shares).sum(0), wants_stop]))

    def micro_batches(self, loaded: LoadedBatch, parts: int) -> Iterator[tuple[Batch, bool]]:
        """A batch in `parts`, on the device, each with whether it is the last."""
        for index in range(parts):
            # Every n-th sample, so that each micro-batch has its share of the boundary samples, which come first.
            rows = slice(index, None, parts)
            known = loaded.labels if self.student.classes else None
            labels = None if known is None else to_device(known[rows], self.processes.device)
            x = to_float(to_device(loaded.images[rows], self.processes.device))
            batch = Batch(x, labels, loaded.positions[rows], self.stage.batch)
            yield batch, index == parts - 1

    def streams(self, step: int, batch: Batch) -> SampleStreams:
        """The random numbers of these samples at a step."""
        seeds = [derive_seed(*self.seed, self.retry, step, int(index)) for index in batch.places]
        return SampleStreams(seeds, self.processes.device)

    @contextmanager
    def _synchronising(self, last: bool) -> Iterator[None]:
        """Exchange gradients only with the last micro-batch."""
        if isinstance(self.student, FSDPModule):
            self.student.set_requires_gradient_sync(last)
        if isinstance(self.loss, DistributedDataParallel) and not last:
            with self.loss.no_sync():
                yield
        else:
            yield

    def _bin(self, losses: Losses) -> Tensor:
        """The sums of the weighted loss by t, then the counts."""
        where, device = torch.bucketize(losses.t, self.bin_edges[1:-1]), losses.weighted.device
        sums = torch.zeros(TIME_BINS, device=device).index_add_(0, to_device(where, device), losses.weighted.float())
        return torch.cat([sums, to_device(torch.bincount(where, minlength=TIME_BINS).float(), device)])

    def _clip(self) -> Tensor:
        """The norm of the gradient (1,), which is scaled down to the stage's limit if it has one."""
        parameters = [parameter for parameter in self.student.parameters() if parameter.grad is not None]
        # On a CPU torch takes the faster kernels only when asked to; it refuses them where there are none (Apple's).
        foreach = True if self.processes.device.type == "cpu" else None
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=foreach)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.stage.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.stage.clip, norm, foreach=foreach)
        return norm.float().view(1)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While the block runs, the student has the weights of its first average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        mean = self.averages[0].state_dict()
        for name, parameter in self.student.named_parameters():
            current = parameter.detach().clone()
            parameter.copy_(mean[name])
            mean[name].copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint needs, as views; scalars as vectors, as they are where weights are shared."""
        out = {f"student.{name}": tensor.detach() for name, tensor in self.student.state_dict().items()}
        for place, average in enumerate(self.averages):
            out |= {f"average.{place}.{name}": tensor for name, tensor in average.state_dict().items()}
        for name, parameter in self.student.named_parameters():
            state = self.optimizer.state[parameter]
            out |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
        return {name: tensor.view(1) if tensor.ndim == 0 else tensor for name, tensor in out.items()}

    def position(self, step: int) -> Position:
        """What a checkpoint needs besides the tensors."""
        scaler = self.scaler.state_dict() if self.scaler.is_enabled() else {}
        return Position(step=step, retry=self.retry, guard=self.guard, scaler=scaler)

    def restore(self, position: Position) -> None:
        """Take up a checkpoint's position; its tensors have been read in place."""
        self.retry, self.guard = position.retry, position.guard
        if position.scaler:
            self.scaler.load_state_dict(dict(position.scaler))
