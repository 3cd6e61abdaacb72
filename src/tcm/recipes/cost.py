"""What a stage costs: parameters, FLOPs and memory, counted on the meta device; nothing is computed or allocated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tcm.errors import TcmError
from tcm.networks import DDPMppConfig, EDM2Config, build_network
from tcm.recipes.fields import PairsStage
from tcm.recipes.schema import DiffusionStage, Recipe, Stage, TruncatedStage, network_of

GRADIENT_PASS = 3
"""A forward and backward pass costs about three forward passes."""

UTILISATION = 0.3
PEAK_FLOPS = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
"""An A100's peak. Training U-Nets reaches about UTILISATION of it."""

ASSUMPTION = (
    f"an A100 at {UTILISATION:.0%} of its peak ({PEAK_FLOPS['fp32'] / 1e12:.1f} TFLOP/s in fp32, "
    f"{PEAK_FLOPS['tf32'] / 1e12:.0f} in tf32, {PEAK_FLOPS['fp16'] / 1e12:.0f} in 16 bit)"
)


GPUS_PER_NODE = 8
WITHIN_NODE, BETWEEN_NODES = 230e9, 25e9
"""Bytes/s that a GPU of an A100 node sends: over NVLink as NCCL reaches it, and over its 200 Gb/s network card."""

LINKS = f"{WITHIN_NODE / 1e9:.0f} GB/s per GPU within {GPUS_PER_NODE}, {BETWEEN_NODES / 1e9:.0f} GB/s beyond"


@dataclass(frozen=True)
class Memory:
    """Bytes in a process during a step, without data parallelism's or the allocator's own."""

    weights: int
    gradients: int
    optimizer: int
    averages: int
    frozen: int
    teacher: int
    kept_once: int
    activations: int

    @property
    def state(self) -> int:
        """All but the activations: what does not depend on the batch; `kept_once` are EDM2's normalised weights."""
        return self.total - self.activations

    @property
    def total(self) -> int:
        """Everything."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Cost:
    """The cost of a stage; a multiplication and an addition are two FLOPs, `gpu_hours` are predicted for ASSUMPTION."""

    parameters: int
    forward_flops: int
    step_flops: int
    activations_per_image: int
    memory: Memory
    gpu_hours: float


def estimate(recipe: Recipe, stage: Stage, processes: int = 1) -> Cost:
    """The cost of a stage whose batch is shared by `processes`.

    Per image: 3 forward passes for the student, 1 for the target (not in a diffusion stage), 1 (Euler) or 2 (Heun) for
    a teacher, twice that with guidance. Activations are what autograd keeps for the backward pass.

    >>> from tcm.recipes.resolve import resolve
    >>> cifar10 = resolve("cifar10")
    >>> estimate(cifar10, cifar10.stages["truncated"]).parameters
    55732739
    """
    network = _measure(network_of(recipe, stage), *_shape_and_classes(recipe))
    passes = GRADIENT_PASS + _passes_without_gradient(stage)
    step_flops = passes * network.forward_flops * stage.batch
    half = 2 if stage.precision in ("bf16", "fp16") else 1
    micro_batch = -(-stage.batch // (stage.accumulation * processes))
    weights = 4 * network.parameters
    frozen = weights // (2 if stage.frozen_precision == "bf16" else 1) if isinstance(stage, TruncatedStage) else 0
    distils = isinstance(stage, PairsStage) and stage.teacher is not None
    memory = Memory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,
        averages=len(stage.averages) * weights,
        frozen=frozen,
        teacher=weights if distils else 0,
        kept_once=network.saved_once // half,
        activations=network.saved_per_image // half * micro_batch,
    )
    seconds = stage.steps * step_flops / (PEAK_FLOPS[stage.precision] * UTILISATION)
    return Cost(
        network.parameters,
        network.forward_flops,
        step_flops,
        network.saved_per_image // half,
        memory,
        gpu_hours=seconds / 3600,
    )


@dataclass(frozen=True)
class Scaling:
    """A step shared by GPUs, predicted: bytes that each sends with the weights on every GPU (`replicated`) or `sharded`
    (FSDP), and seconds of computing and of the replicated exchange, one after the other: nothing is hidden.
    """

    gpus: int
    replicated_bytes: int
    sharded_bytes: int
    compute_seconds: float
    exchange_seconds: float

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return self.compute_seconds + self.exchange_seconds

    @property
    def efficiency(self) -> float:
        """The speed-up over one GPU, divided by the number of GPUs."""
        return self.compute_seconds / self.seconds


def scaling(recipe: Recipe, stage: Stage, gpus: int) -> Scaling:
    """A stage's step on `gpus` A100s, predicted.

    A ring all-reduce of G bytes of gradients sends 2 G (n − 1)/n from each of n GPUs. Sharded, each pass gathers its
    network's weights, the backward pass once more, and the gradients are reduced and scattered: (n − 1)/n of each.

    >>> from tcm.recipes.resolve import resolve
    >>> cifar10 = resolve("cifar10")
    >>> scaling(cifar10, cifar10.stages["truncated"], 8).replicated_bytes == 2 * 4 * 55732739 * 7 // 8
    True
    """
    cost = estimate(recipe, stage, gpus)
    sent = 4 * cost.parameters * (gpus - 1) / gpus
    gathers = 2 + _passes_without_gradient(stage) + isinstance(stage, TruncatedStage)
    micro_batches = stage.accumulation
    link = WITHIN_NODE if gpus <= GPUS_PER_NODE else BETWEEN_NODES
    return Scaling(
        gpus,
        replicated_bytes=int(2 * sent),
        sharded_bytes=int((gathers * micro_batches + 1) * sent),
        compute_seconds=cost.step_flops / (PEAK_FLOPS[stage.precision] * UTILISATION * gpus),
        exchange_seconds=2 * sent / link,
    )


def _passes_without_gradient(stage: Stage) -> int:
    if isinstance(stage, DiffusionStage):
        return 0
    if stage.teacher is None:
        return 1
    return 1 + {"euler": 1, "heun": 2}[stage.solver] * (1 if stage.guidance == 1 else 2)


def _shape_and_classes(recipe: Recipe) -> tuple[tuple[int, int, int], int]:
    if recipe.image_shape is None:
        raise TcmError(
            f"{recipe.name}: image_shape is not set, so that costs cannot be computed without the data; "
            f"add it, such as image_shape = [3, 32, 32]"
        )
    if recipe.conditional and recipe.classes is None:
        raise TcmError(
            f"{recipe.name}: classes is not set, so that costs cannot be computed without the data; "
            f"add it, such as classes = 10"
        )
    return recipe.image_shape, (recipe.classes or 0) if recipe.conditional else 0


@dataclass(frozen=True)
class _NetworkCost:
    parameters: int
    forward_flops: int
    saved_once: int
    saved_per_image: int


@lru_cache(maxsize=64)
def _measure(config: DDPMppConfig | EDM2Config, image_shape: tuple[int, int, int], classes: int) -> _NetworkCost:
    with torch.device("meta"):
        network = build_network(config, image_shape, classes)
        parameters = list(network.parameters())

        def forward(batch: int) -> None:
            masks = [torch.ones(batch, *shape, dtype=torch.bool) for shape in network.dropout_shapes]
            labels = torch.zeros(batch, dtype=torch.long) if classes else None
            network(torch.zeros(batch, *image_shape), torch.zeros(batch), labels, masks if config.dropout else None)

        one, two = _SavedBytes(parameters), _SavedBytes(parameters)
        with FlopCounterMode(display=False) as counter:
            forward(1)
        for batch, saved in ((1, one), (2, two)):
            with _FusedAttention(), saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                forward(batch)
    per_image = two.total() - one.total()
    return _NetworkCost(
        sum(parameter.numel() for parameter in parameters),
        counter.get_total_flops(),
        saved_once=one.total() - per_image,
        saved_per_image=per_image,
    )


class _FusedAttention(TorchFunctionMode):
    """Attention by a fused kernel, which torch would not choose on the meta device: it keeps far less."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments)[0]
        return function(*arguments, **(options or {}))


class _SavedBytes:
    """The bytes of all storages that autograd keeps, each once, without those of the parameters."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages[storage._cdata] = storage
        return tensor

    def total(self) -> int:
        """The bytes so far."""
        return sum(storage.nbytes() for storage in self._storages.values())
