"""The networks' attention layers with torch's fused kernel, against two other ways to attend."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio
from tcm.networks import ddpmpp, edm2
from tcm.networks.forward_mode import attend
from tcm.networks.layers import split_heads

TITLE = "attention layers with the fused kernel against transposed views and against two matrix products"
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "DDPM++, 1 head of 256": (lambda: ddpmpp.Attention(256), 256),
    "EDM2-S, 9 heads of 64": (lambda: edm2.Attention(576, 9), 576),
}
SIDE = 16
PASSES = ("forward", "forward and backward")


def measure(settings: Settings) -> list[Row]:
    rows = []
    for layer in LAYERS:
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            for passes in PASSES:
                runs = {way: run(layer, passes, 2 if settings.quick else 16, way, dtype) for way in WAYS}
                times = interleave(settings, runs, rounds=15, warm=3)
                fused = times.pop("fused")
                rows += [ratio(f"{layer}, {precision}, {passes}: fused / {way}", fused, t) for way, t in times.items()]
        for passes in PASSES:
            batch = 4 if settings.quick else 64
            held = {way: in_fresh_process(held_bytes, layer, passes, batch, way) for way in WAYS}
            for way in ("transposed views", "two products"):
                what = f"{layer}, fp32, {passes}, batch {batch}: memory, fused / {way}"
                rows.append(Row(what, held["fused"] / held[way], "×"))
    return rows


def run(layer: str, passes: str, batch: int, way: str, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """A pass through a layer."""
    make, channels = LAYERS[layer]
    module, x = make(), torch.randn(batch, channels, SIDE, SIDE, requires_grad=True)
    split, product = WAYS[way]

    def once() -> None:
        with (
            patch.multiple(ddpmpp, split_heads=split, attend=product),
            patch.multiple(edm2, split_heads=split, attend=product),
            torch.set_grad_enabled(passes != "forward"),
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        ):
            out = module(x)
        if passes != "forward":
            torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out))

    return once


def held_bytes(layer: str, passes: str, batch: int, way: str) -> float:
    """How much the peak memory of this process rises beyond the layer's input."""
    run(layer, passes, 1, way)()  # what torch loads once
    once = run(layer, passes, batch, way)
    before = peak_bytes()
    once()
    return peak_bytes() - before


def transposed_views(qkv: Tensor, heads: int) -> Tensor:
    """Without a copy, and so without the fused kernel."""
    return qkv.reshape(len(qkv), heads, -1, 3, qkv.shape[2] * qkv.shape[3]).permute(3, 0, 1, 4, 2)


def two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).div(q.shape[3] ** 0.5).softmax(-1) @ v


WAYS = {
    "fused": (split_heads, attend),
    "transposed views": (transposed_views, attend),
    "two products": (transposed_views, two_products),
}
