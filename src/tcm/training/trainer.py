"""One stage's state and one step of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tcm.data.loader import LoadedBatch
from tcm.data.pixels import to_float
from tcm.foundation.devices import to_device
from tcm.foundation.processes import Processes
from tcm.foundation.randomness import SampleStreams, derive_seed
from tcm.method.averaging import follow
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.recipes.stages import Role, Stage
from tcm.training.checkpoint import Position
from tcm.training.guard import Verdict
from tcm.training.learner import Learner
from tcm.training.metrics import TIME_BINS
from tcm.training.precision import arithmetic


@dataclass(frozen=True)
class StepRecord:
    """What a step did, the same in every process.

    `numbers` are the losses and gradient norms of the turns, those of other roles than the student's with the role
    before the name: `fake.loss`. `bins` are the student's, zeros if it was not its turn.
    """

    numbers: dict[str, float]
    bins: list[float]
    verdict: Verdict
    reason: str
    stop: bool


class Trainer:
    """The models of a stage, those that learn and those that help, and its steps.

    All randomness is a function of (seed, stage, retry, step, index in the global batch).
    """

    def __init__(
        self,
        stage: Stage,
        objective: Objective,
        models: Models,
        roles: Mapping[str, Role],
        processes: Processes,
        seed: tuple[int, str],
        bin_edges: Tensor,
        schedule_offset: int = 0,
    ) -> None:
        self.stage, self.objective, self.models, self.processes = stage, objective, models, processes
        self.seed, self.bin_edges = seed, bin_edges
        every = {turn.role: turn.every for turn in stage.turns()}
        self.learners = {
            name: Learner(
                name,
                role.optimization or stage,
                objective,
                models,
                processes,
                schedule_offset,
                scaled=stage.precision == "fp16",
                every=every.get(name, 1),
            )
            for name, role in roles.items()
            if role.trained
        }
        self.followers = {name: role.follows for name, role in roles.items() if role.follows is not None}
        self.learner = self.learners["student"]
        self.student = models["student"]
        self.retry = 0

    def step(self, step: int, loaded: LoadedBatch, stop: bool = False) -> StepRecord:
        """The updates of all roles whose turn it is: loss, backward, clip, optimiser, averages.

        The guard decides whether an update is made; the step's verdict is the most severe of its turns'.
        """
        due = [turn.role for turn in self.stage.turns() if step % turn.every == 0]
        records = {role: self._turn(self.learners[role], step, loaded, stop) for role in due}
        numbers = {name: value for record in records.values() for name, value in record.numbers.items()}
        worst = max(records.values(), key=lambda record: ("good", "skip", "go back").index(record.verdict))
        bins = records["student"].bins if "student" in records else [0.0] * (2 * TIME_BINS)
        return StepRecord(numbers, bins, worst.verdict, worst.reason, any(record.stop for record in records.values()))

    def rehearse(self, step: int, loaded: LoadedBatch) -> None:
        """The passes of a step without its updates, as long as they take."""
        for learner in self.learners.values():
            self._learn_only(learner)
            self._backward(learner, step, loaded, False)
            learner.optimizer.zero_grad(set_to_none=True)

    def _learn_only(self, learner: Learner) -> None:
        for role, other in self.learners.items() if len(self.learners) > 1 else ():
            other.denoiser.learn(role == learner.role)

    def _turn(self, learner: Learner, step: int, loaded: LoadedBatch, stop: bool) -> StepRecord:
        self._learn_only(learner)
        if not learner.settled:
            # DistributedDataParallel orders its buckets by the first backward pass, and the order in which three or
            # more processes sum depends on them: without this, the first step after a resume would round differently.
            self._backward(learner, step, loaded, stop)
            learner.settled = True
        learner.begin(step)
        names, values = self._backward(learner, step, loaded, stop)
        # The one copy back from the device: the guard has to see the numbers before the update.
        *numbers, stops, gradient_norm = torch.cat([values, learner.clip()]).tolist()
        bins = numbers[len(names) :]
        verdict, reason = learner.update(step, numbers[0], gradient_norm)
        if verdict == "good":
            for role, (followed, decay) in self.followers.items():
                if followed == learner.role:
                    follow(self.models[role], learner.denoiser, decay.beta(learner.iteration(step)))
        found = dict(zip(names, numbers, strict=False)) | {"gradient_norm": gradient_norm}
        found = {f"{learner.prefix}{name}": number for name, number in found.items()}
        if learner.prefix and reason:
            reason = f"{learner.role}: {reason}"
        return StepRecord(found, bins, verdict, reason, stops > 0)

    def _backward(self, learner: Learner, step: int, loaded: LoadedBatch, stop: bool) -> tuple[list[str], Tensor]:
        """Gradients of the global batch's loss.

        Returns the names of the loss and its parts, and their values, followed by the loss by t and the number of
        processes that want to stop, all summed over the processes.
        """
        names: list[str] = []
        shares = []
        for micro, last in self.micro_batches(loaded, self.stage.accumulation):
            with learner.synchronising(last):
                with arithmetic(self.stage, self.models, self.stage.precision, self.processes.device):
                    losses: Losses = learner.loss(micro, step, self.streams(step, micro, learner.role))
                learner.backward(losses.total)
            names = ["loss", *losses.parts]
            parts = torch.stack([losses.total.detach(), *losses.parts.values()]).float()
            shares.append(torch.cat([parts, self._bin(losses)]))
        wants_stop = torch.full((1,), float(stop), device=self.processes.device)
        values = self.processes.sum(torch.cat([torch.stack(shares).sum(0), wants_stop]))
        return names, values

    def micro_batches(self, loaded: LoadedBatch, parts: int) -> Iterator[tuple[Batch, bool]]:
        """A batch in `parts`, on the device, each with whether it is the last."""
        device = self.processes.device
        for part in range(parts):
            # Every n-th sample, so that each micro-batch has its share of the boundary samples, which come first.
            rows = slice(part, None, parts)
            known = loaded.condition if self.student.condition is not None else None
            condition = None if known is None else known.select(rows).to(device)
            x = to_float(to_device(loaded.images[rows], device))
            stored = None if loaded.trajectory is None else loaded.trajectory.select(rows).to(device)
            yield Batch(x, condition, loaded.index[rows], self.stage.batch, stored), part == parts - 1

    def streams(self, step: int, batch: Batch, turn: str = "student") -> SampleStreams:
        """The random numbers of these samples at a step."""
        turns = () if turn == "student" else (turn,)
        seeds = [derive_seed(*self.seed, *turns, self.retry, step, int(index)) for index in batch.index]
        return SampleStreams(seeds, self.processes.device)

    def _bin(self, losses: Losses) -> Tensor:
        """The sums of the weighted loss by t, then the counts."""
        where, device = torch.bucketize(losses.t.contiguous(), self.bin_edges[1:-1]), losses.weighted.device
        sums = torch.zeros(TIME_BINS, device=device).index_add_(0, to_device(where, device), losses.weighted.float())
        return torch.cat([sums, to_device(torch.bincount(where, minlength=TIME_BINS).float(), device)])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While the block runs, the student has the weights of its first average."""
        self.learner.exchange()
        try:
            yield
        finally:
            self.learner.exchange()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint needs, as views; scalars as vectors, as they are where weights are shared."""
        out = {name: tensor for learner in self.learners.values() for name, tensor in learner.tensors().items()}
        for role in self.followers:
            out |= {f"{role}.{name}": tensor.detach() for name, tensor in self.models[role].state_dict().items()}
        return {name: tensor.view(1) if tensor.ndim == 0 else tensor for name, tensor in out.items()}

    def position(self, step: int) -> Position:
        """What a checkpoint needs besides the tensors."""
        others = {role: learner.position() for role, learner in self.learners.items() if role != "student"}
        own = self.learner.position()
        return Position(step=step, retry=self.retry, guard=own.guard, scaler=own.scaler, others=others)

    def restore(self, position: Position) -> None:
        """Resume from a checkpoint's position; its tensors have been read in place."""
        self.retry = position.retry
        for role, learner in self.learners.items():
            learner.restore(position if role == "student" else position.others[role])

    def go_back(self, position: Position) -> None:
        """Return to a checkpoint's position with other noise; the skipped updates of all roles stay counted."""
        retry, skipped = self.retry + 1, {role: learner.guard.skipped for role, learner in self.learners.items()}
        self.restore(position)
        self.retry = retry
        for role, learner in self.learners.items():
            learner.guard = replace(learner.guard, in_a_row=0, skipped=skipped[role])

    @property
    def skipping(self) -> bool:
        """Whether the last update of any role was skipped."""
        return any(learner.guard.in_a_row for learner in self.learners.values())

    @property
    def skipped(self) -> int:
        """The updates skipped so far, of all roles."""
        return sum(learner.guard.skipped for learner in self.learners.values())
