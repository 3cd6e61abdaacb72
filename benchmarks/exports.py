"""Exports against torch: the largest differences, and images/s of onnxruntime."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
import torch
from torch import Tensor

import tcm
from benchmarks.cases import ddpmpp, small
from benchmarks.harness import Row, Settings, interleave, ratio, spread
from benchmarks.sampling import fresh
from tcm.data.pixels import to_uint8
from tcm.weights.diffusers_export import export_diffusers
from tcm.weights.onnx_export import export_onnx
from tcm.weights.onnx_graphs import condition_inputs

TITLE = "ONNX and diffusers against torch: largest differences, and images/s in one step"
SECONDS = 0.3
"""How long a contestant computes in each of its turns, so that a turn is more than the clock's noise."""


def measure(settings: Settings) -> list[Row]:
    rows = []
    with TemporaryDirectory() as place:
        for name, model in small_models().items():
            rows += differences(name, model, Path(place))
        full = ddpmpp(settings)
        rows.append(difference_of_function(full.name, scrambled(fresh(full)), Path(place)))
    with TemporaryDirectory() as place:
        for name, model in {"digits": tcm.load("digits"), "cifar10-small": scrambled(fresh(small(settings)))}.items():
            rows += speeds(settings, name, model, Path(place))
    return rows


def small_models() -> dict[str, tcm.Model]:
    """One of each kind of network; those of random weights are tiny."""
    shape, classes = (3, 16, 16), tcm.Classes(5)
    networks = {
        "tiny DDPM++": (tcm.DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=1, attention=(8,)), None),
        "tiny EDM2": (tcm.EDM2Config(channels=64, channel_mult=(1, 2), blocks=1, attention=(8,)), classes),
    }
    return {"digits": tcm.load("digits")} | {
        name: scrambled(
            tcm.Model.fresh(tcm.ModelCard(kind="truncated", network=network, condition=kind, image_shape=shape))
        )
        for name, (network, kind) in networks.items()
    }


@torch.no_grad()
def scrambled(model: tcm.Model) -> tcm.Model:
    """Outputs of fresh networks are near zero, which hides errors: each weight is moved, and gains are opened."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.denoiser.parameters():
        moved = 0.02 * torch.randn(parameter.shape, generator=generator)
        parameter.add_(moved if parameter.ndim else 0.5)
    return model


def differences(name: str, model: tcm.Model, place: Path) -> list[Row]:
    """As the exports themselves find them: f at five times, and the pixels of samplers."""
    rows = []
    for half in (False, True):
        precision = "fp16" if half else "fp32"
        f, *samplers = export_onnx(model, place / f"{name} {precision}", half=half)
        rows.append(Row(f"{name}: f, ONNX {precision}", f.difference, goal="" if half else "≤ 1e-4"))
        levels = max(sampler.difference for sampler in samplers)
        rows.append(Row(f"{name}: pixels, ONNX {precision}", levels, "of 255 levels"))
    rows.append(Row(f"{name}: images, diffusers", export_diffusers(model, place / f"{name} diffusers"), goal="≤ 1e-4"))
    return rows


def difference_of_function(name: str, model: tcm.Model, place: Path) -> Row:
    """The paper's network, whose export takes a minute."""
    f, *_ = export_onnx(model, place / name)
    return Row(f"{name}: f, ONNX fp32", f.difference, goal="≤ 1e-4")


def speeds(settings: Settings, name: str, model: tcm.Model, place: Path) -> list[Row]:
    rows = []
    export_onnx(model, place / name)
    for threads in (1,) if settings.cpu_time else (1, 2):
        for batch in (1, 8 if settings.quick else 256):
            with torch_threads(threads):
                noise, runs = contestants(model, place / name / "one-step.onnx", batch, threads)
                turns = {title: repeated(settings, run) for title, run in runs.items()}
                rounds = 9 if name == "digits" else 3
                times = interleave(settings, {title: turn for title, (turn, _) in turns.items()}, rounds)
            rates = {
                title: [turns[title][1] * len(noise) / seconds for seconds in found] for title, found in times.items()
            }
            where = f"{name}, {threads} thread{'s' if threads > 1 else ''}, batch {batch}"
            goal = "≥ 5" if (name, batch) == ("digits", 1) else ""
            rows.append(ratio(f"{where}: onnxruntime / torch", rates["onnxruntime"], rates["torch"], goal))
            rows += [spread(f"{where}: {title}", found, "images/s") for title, found in rates.items()]
    return rows


def contestants(
    model: tcm.Model, path: Path, batch: int, threads: int
) -> tuple[Tensor, dict[str, Callable[[], object]]]:
    """Noise to pixels in one step, by each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    noise = torch.randn(batch, *model.card.image_shape)
    condition = None if model.card.condition is None else model.card.condition.spread(batch)
    inputs = {key: tensor.numpy() for key, tensor in ({"noise": noise} | condition_inputs(condition)).items()}
    t = torch.full((batch,), model.card.t_max)

    @torch.inference_mode()
    def in_torch() -> Tensor:
        return to_uint8(model.denoiser(model.card.t_max * noise, t, condition))

    return noise, {"torch": in_torch, "onnxruntime": lambda: session.run(None, inputs)}


def repeated(settings: Settings, run: Callable[[], object]) -> tuple[Callable[[], None], int]:
    """A turn of about `SECONDS`, and how many runs it holds."""
    run()
    started = settings.now()
    run()
    count = max(1, round((0.01 if settings.quick else SECONDS) / max(settings.now() - started, 1e-6)))

    def turn() -> None:
        for _ in range(count):
            run()

    return turn, count


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
