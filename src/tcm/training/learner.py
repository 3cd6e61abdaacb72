"""One network that learns: its optimiser, averages, loss scaling and guard."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tcm.foundation.processes import Processes
from tcm.foundation.randomness import SampleStreams
from tcm.method.averaging import Average
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.method.preconditioning import Denoiser
from tcm.recipes.stages import Optimization
from tcm.training.checkpoint import LearnerPosition
from tcm.training.guard import GuardState, Verdict, judge
from tcm.training.optimizers import build_optimizer


class LossModule(nn.Module):
    """The objective in one role's turn, as a module: only the weights that move are its parameters.

    One forward pass for each backward pass, as DistributedDataParallel needs it.
    """

    def __init__(self, objective: Objective, models: Models, role: str) -> None:
        super().__init__()
        self.learning = models[role]
        self.objective, self.models, self.role = objective, models, role

    def forward(self, batch: Batch, step: int, streams: SampleStreams) -> Losses:
        return self.objective.loss(self.models, batch, step, streams, self.role)


class Learner:
    """A role's network in training, with its own settings; its loss is scaled where the stage computes in fp16.

    It has its turn in every `every`-th step.
    """

    def __init__(
        self,
        role: str,
        settings: Optimization,
        objective: Objective,
        models: Models,
        processes: Processes,
        schedule_offset: int,
        scaled: bool,
        every: int = 1,
    ) -> None:
        self.role, self.settings, self.processes, self.schedule_offset = role, settings, processes, schedule_offset
        self.every = every
        self.denoiser: Denoiser = models[role]
        self.loss: nn.Module = LossModule(objective, models, role)
        self.sharded = isinstance(self.denoiser, FSDPModule)
        if processes.count > 1 and not self.sharded:
            self.loss = DistributedDataParallel(self.loss)
        learning = (parameter for parameter in self.denoiser.parameters() if parameter.requires_grad)
        self.optimizer = build_optimizer(settings, learning)
        self.averages = [Average(self.denoiser, decay) for decay in settings.averages]
        self.scaler = GradScaler(processes.device.type, init_scale=16.0, growth_interval=20_000, enabled=scaled)
        self.guard = GuardState()
        self.settled = processes.count < 3 or self.sharded

    @property
    def prefix(self) -> str:
        """The prefix of its numbers and tensors: empty for the student."""
        return "" if self.role == "student" else f"{self.role}."

    def learning_rate(self, step: int) -> float:
        return self.settings.rate(step, self.schedule_offset)

    def iteration(self, step: int) -> int:
        """The number of its update at a step: 1, 2, …, whatever other roles do in between."""
        return step // self.every + 1

    def begin(self, step: int) -> None:
        """Before a step's backward passes."""
        self.denoiser.network.normalize_weights()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, total: Tensor) -> None:
        """Every process holds its share of a sum, and the gradients are averaged over processes."""
        torch.autograd.backward(self.scaler.scale(total * self.processes.count))

    def clip(self) -> Tensor:
        """The norm of the gradient (1,), which is scaled down to the limit if there is one."""
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.denoiser.parameters() if parameter.grad is not None]
        # On a CPU torch takes the faster kernels only when asked to; it refuses them where there are none (Apple's).
        foreach = True if self.processes.device.type == "cpu" else None
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=foreach)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.settings.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm, foreach=foreach)
        return norm.float().view(1)

    def update(self, step: int, loss: float, gradient_norm: float) -> tuple[Verdict, str]:
        """The optimiser's update, unless the guard objects; what was decided, and why."""
        self.guard, verdict, reason = judge(self.settings.guard, self.guard, loss, gradient_norm)
        if verdict == "good":
            self.scaler.step(self.optimizer)
            for average in self.averages:
                average.update(self.denoiser, self.schedule_offset + self.iteration(step))
        self.scaler.update()
        return verdict, reason

    @contextmanager
    def synchronising(self, last: bool) -> Iterator[None]:
        """Exchange gradients only with the last micro-batch."""
        if isinstance(self.denoiser, FSDPModule):
            self.denoiser.set_requires_gradient_sync(last)
        if isinstance(self.loss, DistributedDataParallel) and not last:
            with self.loss.no_sync():
                yield
        else:
            yield

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the weights with those of the first average."""
        mean = self.averages[0].state_dict()
        for name, parameter in self.denoiser.named_parameters():
            current = parameter.detach().clone()
            parameter.copy_(mean[name])
            mean[name].copy_(current)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint needs, as views."""
        out = {f"{self.role}.{name}": tensor.detach() for name, tensor in self.denoiser.state_dict().items()}
        for index, average in enumerate(self.averages):
            out |= {f"{self.prefix}average.{index}.{name}": tensor for name, tensor in average.own_state().items()}
        for name, parameter in self.denoiser.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            out |= {f"{self.prefix}optimizer.{name}.{key}": tensor for key, tensor in state.items()}
        return out

    def position(self) -> LearnerPosition:
        """What a checkpoint needs besides the tensors."""
        return LearnerPosition(guard=self.guard, scaler=self.scaler.state_dict() if self.scaler.is_enabled() else {})

    def restore(self, position: LearnerPosition) -> None:
        """Resume from a checkpoint's position; its tensors have been read in place."""
        self.guard = position.guard
        if position.scaler:
            self.scaler.load_state_dict(dict(position.scaler))
