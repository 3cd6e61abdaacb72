"""A stage's arithmetic: what each `precision` of a recipe computes in, and how weights are stored in half of it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from tcm.foundation.devices import fp32_products
from tcm.method.objectives import Models
from tcm.recipes.stages.base import Precision, Stage

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """For forward passes: the network computes in 16 bits if the precision says so."""
    dtype = DTYPES[precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


@contextmanager
def arithmetic(stage: Stage, models: Models, precision: Precision, device: torch.device) -> Iterator[None]:
    """For forward passes of a stage: 16 bits if the precision says so, layer by layer or in whole networks."""
    if stage.half == "autocast" or DTYPES[precision] == torch.float32:
        with autocast(precision, device):
            yield
        return
    networks = [model.network for model in models.values()]
    for network in networks:
        network.arithmetic = DTYPES[precision]
    try:
        yield
    finally:
        for network in networks:
            network.arithmetic = None


def products(precision: Precision) -> AbstractContextManager[None]:
    """For forward and backward passes: float32 products are IEEE's in every precision but tf32."""
    return fp32_products("tf32" if precision == "tf32" else "ieee")


def store_in_bfloat16(network: nn.Module) -> None:
    """Keep the weights in bfloat16; the network computes with them as before, layer by layer in float32.

    Buffers, such as EDM2's frequencies, stay as they are. Computing in bfloat16 would drown a pair's difference;
    weights that are rounded once make a slightly different network, and no noise.
    """
    for module in list(network.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            parameter.data = parameter.data.to(torch.bfloat16)
            register_parametrization(module, name, _Widened(), unsafe=True)


class _Widened(nn.Module):
    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()
