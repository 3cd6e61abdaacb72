"""One file that holds a model, what runs it, and the page around it: it opens from the disk, without any network."""

import gzip
import json
import re
from base64 import b64encode
from html import escape
from importlib.resources import files
from math import ceil, log10, prod, sqrt
from pathlib import Path

import torch

from tcm.foundation.errors import TcmError
from tcm.foundation.files import write_text
from tcm.method.conditions import Classes, ClassMix
from tcm.method.sampling import ConsistencySampler
from tcm.report.playground.runtime import Runtime
from tcm.weights import Model, ModelCard
from tcm.weights.onnx_graphs import ConsistencyFunction, condition_inputs, onnx_bytes

WEB = files("tcm.report.playground") / "web"
MODULES = (
    *("dom", "philox", "blake2b", "noise", "pacing", "pixels", "timescale", "settings", "sampling"),
    *("engine", "theme", "classes", "samples", "slider", "drawing", "main"),
)
"""The page's scripts, each after those that it imports from."""
MOST_BYTES = 300_000_000
"""A larger graph would be a longer text than browsers take."""
PIXELS_IN_GRID = 36_000
DRAWING_TIME = 1.0


def write_playground(model: Model, name: str, command: str, runtime: Runtime, out: Path) -> int:
    """Write the page, whole or not at all; returns its size in bytes.

    `command` is how `tcm sample` is given the same model.
    """
    page = playground(model, name, command, runtime)
    write_text(out, page)
    return len(page.encode())


def playground(model: Model, name: str, command: str, runtime: Runtime) -> str:
    """The page as text."""
    check_playable(model.card)
    graph = browser_graph(model)
    if len(graph) > MOST_BYTES:
        raise TcmError(
            f"the model is {len(graph) / 1e6:,.0f} MB, more than the {MOST_BYTES / 1e6:,.0f} MB that fit in one page; "
            "give a smaller model"
        )
    parts = {
        "title": escape(name),
        "facts": escape(_facts(model)),
        "licence": escape(_licence(model.card)),
        "style": (files("tcm.report") / "style.css").read_text("utf-8") + _read("playground.css"),
        "model": json.dumps(_description(model.card, name, command)).replace("<", "\\u003c"),
        "runtime": _packed(runtime.code),
        "wasm": _packed(runtime.wasm),
        "graph": _packed(graph),
        "worker": _read("worker.js"),
        "script": _script(),
    }
    # One pass, so that nothing in a part is taken for the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def check_playable(card: ModelCard) -> None:
    """Refuse a model that the page's scripts cannot sample."""
    card.check_alone("a page")
    if not isinstance(card.sampler, ConsistencySampler):
        raise TcmError(
            f"sampler={card.sampler.kind}: a page generates with consistency models, in one or two evaluations; give "
            "the model of a consistency or truncated stage"
        )
    if not isinstance(card.condition, Classes | None):
        raise TcmError(
            f"condition={card.condition}: a page supports only classes, or no condition; use `tcm sample` for this "
            "model"
        )
    if card.image_shape[0] not in (1, 3):
        raise TcmError(
            f"image_shape={card.image_shape}: a page shows grey and RGB images; give a model of 1 or 3 channels"
        )


def browser_graph(model: Model) -> bytes:
    """f(x, t, classes) as ONNX; `classes` has a weight for each class, so that they can be mixed."""
    card, rows = model.card, 2
    kind, device = card.condition, next(model.denoiser.parameters()).device
    mix = ClassMix(torch.full((rows, kind.count), 1 / kind.count, device=device)) if isinstance(kind, Classes) else None
    x, t = torch.zeros(rows, *card.image_shape, device=device), torch.full((rows,), card.t_max, device=device)
    return onnx_bytes(ConsistencyFunction(model.denoiser, mix), {"x": x, "t": t} | condition_inputs(mix), "images")


def _description(card: ModelCard, name: str, command: str) -> dict[str, object]:
    """What the scripts need to know of the model."""
    assert isinstance(card.sampler, ConsistencySampler)
    side = max(2, min(8, round(sqrt(PIXELS_IN_GRID / prod(card.image_shape[1:])))))
    return {
        "file": re.sub(r"[^\w-]+", "-", name).strip("-") or "image",
        "command": command,
        "shape": card.image_shape,
        "classes": _class_names(card),
        "tMin": card.t_min,
        "tMax": card.t_max,
        "secondTime": max(card.sampler.second_time, card.t_min),
        "highestSecondTime": _three_digits_below(card.t_max),
        "drawingTime": min(max(DRAWING_TIME, card.t_min), card.t_max),
        "grid": side * side,
    }


def _class_names(card: ModelCard) -> list[str]:
    kind = card.condition
    if not isinstance(kind, Classes):
        return []
    return list(kind.names) or [str(index) for index in range(kind.count)]


def _three_digits_below(t: float) -> float:
    """The highest time of three digits below t: the second time must be lower than the first.

    >>> _three_digits_below(80.0), _three_digits_below(1.0)
    (79.9, 0.999)
    """
    unit = 10.0 ** (ceil(log10(t)) - 3)
    return float(f"{t - unit:.3g}")


def _facts(model: Model) -> str:
    card = model.card
    channels, height, width = card.image_shape
    parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
    return " · ".join(
        [
            f"{card.kind} model",
            f"{height} × {width} {'grey' if channels == 1 else 'RGB'}",
            str(card.condition or "unconditional"),
            f"t from {card.t_min:g} to {card.t_max:g}",
            f"{parameters:,} parameters",
        ]
    )


def _licence(card: ModelCard) -> str:
    licence = card.provenance.licence
    return f"The model's licence: {licence}. " if licence else ""


def _packed(content: bytes) -> str:
    return b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _script() -> str:
    """All modules as one, without the lines that connect them: a page from the disk cannot load files beside it."""
    text = "\n".join(_read(f"{name}.js") for name in MODULES)
    return re.sub(r"^export ", "", re.sub(r"^import [^;]+;\n", "", text, flags=re.M), flags=re.M)


def _read(name: str) -> str:
    return (WEB / name).read_text("utf-8")
