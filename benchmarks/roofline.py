"""How near the networks come to the machine's peak, layer by layer, and what the rest of the time goes to."""

from collections import defaultdict
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Row, Settings, interleave
from tcm.foundation.randomness import SampleStreams
from tcm.networks import DDPMppConfig, EDM2Config

TITLE = "fraction of the machine's measured peak, and where the rest goes"
KINDS = {
    "convolutions": ("convolution", "conv2d"),
    "matrix products and attention": ("mm", "attention", "softmax"),
    "group norm": ("group_norm",),
    "SiLU": ("silu",),
    "weight and activation norms": ("vector_norm", "div", "sgn", "masked_fill", "neg"),
    "copies, concatenation, doubling": ("copy", "cat", "index", "stack", "slice"),
    "sums, products, clamps, halving": ("add", "mul", "lerp", "clamp", "where", "sub"),
}


def measure(settings: Settings) -> list[Row]:
    rows = [
        Row(f"{what}, {str(dtype).removeprefix('torch.')}", flops / 1e9, "GFLOP/s")
        for dtype in (torch.float32, torch.bfloat16)
        for what, flops in peak_flops(settings, dtype).items()
    ]
    for name, config, shape, batch in networks(settings):
        rows += network_rows(settings, name, config, shape, batch)
    return rows


def networks(settings: Settings) -> list[tuple[str, DDPMppConfig | EDM2Config, tuple[int, int, int], int]]:
    if settings.quick:
        ddpmpp, edm2 = DDPMppConfig(channels=32, dropout=0.2), EDM2Config(channels=32, dropout=0.4)
        return [("DDPM++, 32 channels", ddpmpp, (3, 32, 32), 2), ("EDM2, 32 channels", edm2, (3, 64, 64), 1)]
    ddpmpp, edm2 = DDPMppConfig(dropout=0.2), EDM2Config(dropout=0.4)
    return [("DDPM++", ddpmpp, (3, 32, 32), 4), ("EDM2-S", edm2, (3, 64, 64), 2)]


def peak_flops(settings: Settings, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product, and of the convolution that DDPM++ mostly consists of."""
    side = 2048
    a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))
    convolution, convolution_flops = typical_convolution(dtype)
    runs = {"matrix product, 2048": lambda: a @ b, "3×3 convolution, 256 channels at 32×32": convolution}
    times = interleave(settings, runs, rounds=20)
    flops = (2 * side**3, convolution_flops)
    return {name: count / min(found) for (name, found), count in zip(times.items(), flops, strict=True)}


def typical_convolution(dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """The convolution that DDPM++ mostly consists of, and its FLOPs."""
    channels, pixels, batch = 256, 32, 4
    x = torch.randn(batch, channels, pixels, pixels, dtype=dtype)
    weight = torch.randn(channels, channels, 3, 3, dtype=dtype)
    return lambda: F.conv2d(x, weight, padding=1), 2 * 9 * batch * channels**2 * pixels**2


def network_rows(
    settings: Settings,
    name: str,
    config: DDPMppConfig | EDM2Config,
    shape: tuple[int, int, int],
    batch: int,
) -> list[Row]:
    """A network's forward pass, and its forward and backward pass, against the peak of the same minute."""
    network = config.build(shape, None)
    masks = network.draw_masks(SampleStreams(range(batch)))
    x, c_noise = torch.randn(batch, *shape), torch.zeros(batch)

    @torch.no_grad()
    def forward() -> Tensor:
        return network(x, c_noise, None, masks)

    def both() -> None:
        network.zero_grad(set_to_none=True)
        torch.autograd.backward(network(x, c_noise, None, masks).square().mean())

    with FlopCounterMode(display=False) as counter:
        forward()
    flops = counter.get_total_flops()
    convolution, convolution_flops = typical_convolution(torch.float32)
    runs = {"peak": lambda: [convolution() for _ in range(10)], "forward": forward, "both": both}
    times = interleave(settings, runs, rounds=5)
    peak = 10 * convolution_flops / min(times["peak"])
    rows = [
        Row(f"{name}: forward, of the peak", 100 * flops / min(times["forward"]) / peak, "%"),
        Row(f"{name}: forward and backward, of the peak", 100 * 3 * flops / min(times["both"]) / peak, "%"),
    ]
    rows += [Row(f"{name}: {kind}, of forward and backward", part, "%") for kind, part in by_kind(both).items()]
    return rows + by_level(settings, name, network, forward, peak)


def by_kind(run: Callable[[], object]) -> dict[str, float]:
    """Per cent of a run's time in each kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    found: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if not event.key.startswith("USDT"):
            kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), "the rest")
            found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: 100 * part / total for kind, part in sorted(found.items(), key=lambda item: -item[1])}


def by_level(
    settings: Settings, name: str, network: nn.Module, forward: Callable[[], Tensor], peak: float
) -> list[Row]:
    """Each block's forward pass against the peak, and all of a level's together."""
    plans = [plan for plan in network.encoder_plan + network.decoder_plan if plan.kind != "conv"]
    blocks = [*network.encoder, *network.decoder]
    with FlopCounterMode(display=False, depth=4) as counter:
        forward()
    started: dict[nn.Module, float] = {}
    taken: dict[nn.Module, float] = dict.fromkeys(blocks, inf)
    hooks = []
    for block in blocks:
        hooks.append(block.register_forward_pre_hook(lambda module, _: started.update({module: settings.now()})))
        hooks.append(
            block.register_forward_hook(
                lambda module, *_: taken.update({module: min(taken[module], settings.now() - started[module])})
            )
        )
    for _ in range(3):
        forward()
    for hook in hooks:
        hook.remove()
    counts = {key: sum(found.values()) for key, found in counter.get_flop_counts().items()}
    rows, levels = [], defaultdict[int, list[float]](lambda: [0.0, 0.0])
    for place, (plan, block) in enumerate(zip(plans, blocks, strict=True)):
        side, index = ("encoder", place) if place < len(network.encoder) else ("decoder", place - len(network.encoder))
        flops = counts[f"{type(network).__name__}.{side}.{index}"]
        levels[plan.level][0] += flops
        levels[plan.level][1] += taken[block]
        what = f"{plan.kind}, level {plan.level}, {plan.channels_in} → {plan.channels_out}"
        what += ", attention" if block.attention is not None else ""
        reached = 100 * flops / taken[block] / peak
        rows.append(Row(f"{name}: {side} {index} ({what}), forward, of the peak", reached, "%", detail=True))
    return rows + [
        Row(f"{name}: blocks of level {level}, forward, of the peak", 100 * flops / seconds / peak, "%")
        for level, (flops, seconds) in sorted(levels.items())
    ]
