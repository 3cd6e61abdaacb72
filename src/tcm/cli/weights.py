"""`tcm import`: published checkpoints in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcm.foundation.errors import TcmError

if TYPE_CHECKING:
    from rich.table import Table

    from tcm.weights.importing import Imported

TrainedAs = Literal["diffusion", "consistency", "truncated"]


def import_weights(
    file: Annotated[
        Path, typer.Argument(help="A .pkl, .pth, .pt or .safetensors file from EDM, EDM2, ECT, TCM or FastGen.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The model folder to write; it must not exist.")],
    kind: Annotated[
        TrainedAs | None, typer.Option("--as", help="What it was trained as, if the file does not say.")
    ] = None,
    t_prime: Annotated[
        float | None,
        typer.Option("--t-prime", help="t' of a truncated model, the lowest time at which it is defined, such as 1.0."),
    ] = None,
    second_time: Annotated[
        float | None,
        typer.Option("--second-time", help="Time of the second of two steps. [1.526 for ImageNet-64, else 1]"),
    ] = None,
) -> None:
    """Turn a published checkpoint, or a file from `tcm export`, into a model folder, without running anything in it."""
    from rich.console import Console

    from tcm.weights.importing import import_checkpoint

    if out.exists():
        raise TcmError(f"--out={out} already exists; name a new folder")
    imported = import_checkpoint(file, kind, t_prime, second_time)
    imported.model.save(out)
    Console().print(account(imported, file, out))


def account(imported: Imported, file: Path, out: Path) -> Table:
    """What was found, mapped and left out, as a table."""
    from rich.markup import escape
    from rich.table import Table

    from tcm.weights.importing import parameter_count

    found, card = imported.found, imported.model.card
    table = Table(title=f"{escape(file.name)} → {escape(str(out))}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    head = (
        f"kept ({card.uncertainty} channels): stage 0 can train it further" if card.uncertainty else "none in the file"
    )
    rows = {
        "found": found.described,
        "network": " ".join(f"{name}={value}" for name, value in card.network.model_dump().items()),
        "trained as": f"{card.kind}, defined for t from {card.t_min} to {card.t_max}",
        "sampled with": card.sampler.describe(imported.model.denoiser, card.sampler.usual_steps[-1], None),
        "images": f"{'×'.join(map(str, card.image_shape))}, {card.condition or 'unconditional'}",
        "numbers": f"{imported.precisions} in the file, float32 here; prefix {found.prefix or 'none'}",
        "mapped": f"{len(found.weights) - len(imported.left_out)} of {len(found.weights)} tensors",
        "parameters": f"{parameter_count(imported.parameters)} ({imported.parameters:,})",
        "uncertainty head": head,
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    left_out = {**imported.left_out, **found.not_used}
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name, why in left_out.items() if why == reason]
        some = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        table.add_row("left out", escape(f"{some}: {reason}"))
    table.add_row("licence", escape(found.licence))
    return table
