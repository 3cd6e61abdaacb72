"""`tcm export`: a model in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcm.cli.flags import ModelName
from tcm.foundation.errors import TcmError

if TYPE_CHECKING:
    from tcm.weights.model import Model

Format = Literal["edm-state-dict", "onnx", "diffusers"]
ENDINGS = {"edm-state-dict": "-edm.safetensors", "onnx": "-onnx", "diffusers": "-diffusers"}


def export_weights(
    model: ModelName,
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="edm-state-dict writes one file of weights, with the reference's names; the others write a folder.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file or folder to write. [next to the model: NAME-edm.safetensors, NAME-onnx, NAME-diffusers]",
        ),
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="For ONNX: compute in fp16, with files of half the size.")
    ] = False,
) -> None:
    """Write a model for other software: the reference implementation, ONNX runtimes or diffusers.

    An ONNX or diffusers export is compared with torch before it is written, and the largest difference is printed.
    """
    from tcm.cli.sample import model_of
    from tcm.foundation.files import check_writable
    from tcm.foundation.progress import busy
    from tcm.weights import load

    if half and to != "onnx":
        raise TcmError(f"--half is only for --to onnx; --to {to} stays in fp32, so leave --half out")
    found = model_of(model)
    out = out or _beside(found, ENDINGS[to])
    check_writable(out)
    loaded = one_network(load(found))
    with busy(f"writing {out}, and comparing it with torch"):
        lines = _write(loaded, to, out, half)
    for line in lines:
        typer.echo(line)


def one_network(model: Model) -> Model:
    """The model without its companion, for what holds one network only; a line says so."""
    if model.card.companion is not None:
        typer.echo(f"the companion, which samples at t = {model.card.t_min:g} and below, is left out", err=True)
    return model.alone


def _write(model: Model, to: Format, out: Path, half: bool) -> list[str]:
    """Write it; returns what to say."""
    if to == "onnx":
        from tcm.weights.onnx_export import export_onnx

        return [str(file) for file in export_onnx(model, out, half=half)]
    if to == "diffusers":
        from tcm.weights.diffusers_export import export_diffusers
        from tcm.weights.pipeline_export import export_pipeline

        difference = (export_diffusers if model.card.latents is None else export_pipeline)(model, out)
        return [f"{out}: largest difference from torch {difference:.1e}"]
    from tcm.weights.exporting import export_state_dict

    return [f"{export_state_dict(model, out)} tensors written to {out}"]


def _beside(model: str, ending: str) -> Path:
    """Beside a model's folder; in the working folder for one that comes with the package or from the hub."""
    folder = Path(model)
    whole = folder.resolve() if folder.is_dir() else Path.cwd() / folder.name
    return whole.with_name(f"{whole.name}{ending}")
