"""What a network costs: parameters, FLOPs and memory, counted on the meta device; nothing is computed or allocated."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tcm.method.conditions import ConditionKind
from tcm.networks.base import ImageShape, NetworkConfig


@dataclass(frozen=True)
class NetworkCost:
    """Of one forward pass; a multiplication and an addition are two FLOPs.

    What autograd keeps for the backward pass, in bytes of fp32: once (EDM2's normalised weights), and for each image.
    `learning` are the parameters that training moves; `recomputes` says that the backward pass computes blocks again.
    """

    parameters: int
    forward_flops: int
    saved_once: int
    saved_per_image: int
    learning: int
    recomputes: bool


@lru_cache(maxsize=64)
def network_cost(config: NetworkConfig, image_shape: ImageShape, condition: ConditionKind | None) -> NetworkCost:
    """The cost of a network.

    >>> from tcm.networks import DDPMppConfig
    >>> network_cost(DDPMppConfig(), (3, 32, 32), None).parameters
    55732739
    """
    recomputes = config.keeping_all() != config
    with torch.device("meta"):
        network = config.keeping_all().build(image_shape, condition)
        parameters = list(network.parameters())

        def forward(batch: int) -> None:
            masks = [torch.ones(batch, *shape, dtype=torch.bool) for shape in network.dropout_shapes]
            given = None if condition is None else condition.dummy(batch).to(torch.device("meta"))
            network(torch.zeros(batch, *image_shape), torch.zeros(batch), given, masks if network.dropout else None)

        one, two = _SavedBytes(parameters), _SavedBytes(parameters)
        with FlopCounterMode(display=False) as counter:
            forward(1)
        for batch, saved in ((1, one), (2, two)):
            with ExitStack() as watched:
                watched.enter_context(_FusedAttention())
                watched.enter_context(saved_tensors_hooks(saved.pack, lambda tensor: tensor))
                if recomputes:
                    watched.enter_context(saved.recomputing(network.blocks()))
                forward(batch)
    per_image = two.total() - one.total()
    return NetworkCost(
        sum(parameter.numel() for parameter in parameters),
        counter.get_total_flops(),
        saved_once=one.total() - per_image,
        saved_per_image=per_image,
        learning=sum(parameter.numel() for parameter in network.learning()),
        recomputes=recomputes,
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
            return _fused_attention(*arguments, **(options or {}))
        return function(*arguments, **(options or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _SavedBytes:
    """The bytes of all storages that autograd keeps, each once, without those of the parameters.

    Of blocks that are recomputed it keeps the inputs, and while the backward pass is in one, all of that block.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._largest = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages[storage._cdata] = storage
        return tensor

    @contextmanager
    def recomputing(self, blocks: list[torch.nn.Module]) -> Iterator[None]:
        """While the block runs, treat these parts of the network as recomputed."""
        hooks = [block.register_forward_pre_hook(self._enter, with_kwargs=True) for block in blocks]
        hooks += [block.register_forward_hook(self._leave) for block in blocks]
        yield
        for hook in hooks:
            hook.remove()

    def _enter(self, block: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        for tensor in (*inputs, *named.values()):
            if isinstance(tensor, Tensor):
                self.pack(tensor)
        self._outside = dict(self._storages)

    def _leave(self, block: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._largest = max(self._largest, _bytes(self._storages) - _bytes(self._outside))
        self._storages = self._outside

    def total(self) -> int:
        """The bytes so far."""
        return _bytes(self._storages) + self._largest


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())
