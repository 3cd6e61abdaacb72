"""`tcm data`: fetch, inspect and prepare data sets."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcm.cli.flags import Group
from tcm.foundation.errors import TcmError, TcmWarning

if TYPE_CHECKING:
    from rich.table import Table

    from tcm.data import Broken, Dataset, Summary
    from tcm.data.pictures import Pictures
    from tcm.data.prepare import Form, Prepared
    from tcm.text.autoencoders import Latents
    from tcm.text.condition import Texts

app = typer.Typer(cls=Group, no_args_is_help=True, help="Fetch, inspect and prepare data sets.")

SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Skip images that cannot be read, and list them.")]
Channels = Annotated[int | None, typer.Option(help="Convert to 1 (grey) or 3 (RGB) channels.")]
Split = Annotated[str, typer.Option(help="The split to open, if there are several.")]
CropName = Literal["none", "center", "dhariwal"]
CROP_HELP = (
    "How to crop images of another shape: center keeps the largest centred part (as in EDM), dhariwal is the crop of "
    "ImageNet-64 (Dhariwal and Nichol: halve while twice too large, scale, cut out the centre), none does not crop. "
    "[center]"
)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="cifar10, emoji, fashion-mnist or mnist.")],
    out: Annotated[
        Path | None, typer.Option(help="The .npz to write; by default in the cache, where tcm finds it by name.")
    ] = None,
) -> None:
    """Fetch a data set, verify it and write it as one file; a second call only verifies it."""
    from rich.console import Console

    from tcm.data import fetch_dataset

    with Console(stderr=True).status(f"fetching {name}"):
        fetched = fetch_dataset(name, out)
    _say(f"{name}: {fetched.path} ({fetched.source}; verified)")


@app.command()
def info(
    path: Annotated[
        str, typer.Argument(help="digits, the name of a fetched data set, a file, a folder, or hf://owner/name.")
    ],
    grid: Annotated[Path, typer.Option(help="Where to write a picture of 64 samples.")] = Path("data-samples.png"),
    split: Split = "train",
    channels: Channels = None,
    skip_broken: SkipBroken = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show what is in a data set, and write a picture of samples from it."""
    import json
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    import numpy as np
    from rich.console import Console

    from tcm.data import save_grid, summarize

    with TemporaryDirectory() as place, Console(stderr=True).status(f"reading {path}"):
        dataset, broken = _in_one_form(path, split, channels, skip_broken, Path(place) / "data.zip")
        if dataset.latents is not None:
            _say_latents(path, dataset, dataset.latents, as_json)
            return
        summary = replace(summarize(dataset), skipped=(*dataset.skipped, *broken))
        pixels = dataset.pixels(np.linspace(0, dataset.count - 1, min(64, dataset.count)).astype(np.int64))
    save_grid(grid, pixels, columns=min(8, dataset.count), scale=max(1, 64 // max(dataset.shape[1:])))
    if as_json:
        classes = [{"name": name, "count": count} for name, count in summary.class_counts]
        figures = {"data": path} | asdict(summary) | {"class_counts": classes, "samples": str(grid)}
        typer.echo(json.dumps(figures, indent=2, ensure_ascii=False))
        return
    Console().print(_table(path, summary))
    _name_skipped(summary.skipped)
    _say(f"64 samples: {grid}" if dataset.count >= 64 else f"all images: {grid}")


def _in_one_form(
    path: str, split: str, channels: int | None, skip_broken: bool, prepared: Path
) -> tuple[Dataset, list[Broken]]:
    """A data set; images of several sizes or colours are first `prepared` in one form, as `tcm plan` does it."""
    from tcm.data import open_dataset
    from tcm.data.opening import check_channels, open_pictures
    from tcm.data.pictures import Pictures
    from tcm.data.prepare import Preparation, one_small_form, prepared_images, survey, write_prepared

    check_channels(channels)
    pictures = open_pictures(path, split)
    found = survey(pictures) if isinstance(pictures, Pictures) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TcmWarning)  # said when the pictures were opened; what was left out is shown
        if found is None or (found.size is not None and (found.same_channels or channels is not None)):
            return open_dataset(path, split=split, channels=channels, skip_broken=skip_broken), []
        form = replace(one_small_form(found), channels=channels or found.channels)
        preparation = Preparation(pictures, form)
        images = prepared_images(preparation, skip_broken, os.cpu_count() or 1)
        _, broken = write_prepared(prepared, images, preparation.annotations)
    warnings.warn(
        f"{path}: images of several kinds, shown as `tcm plan` prepares them: {form}", TcmWarning, stacklevel=2
    )
    return open_dataset(prepared), broken


def _say_latents(path: str, dataset: Dataset, latents: Latents, as_json: bool) -> None:
    """What is known of latents: no figures of pixels, and no picture."""
    import json
    from dataclasses import asdict

    kind = dataset.condition_kind
    if not as_json:
        return _say(f"{path}: {dataset.count:,} {latents}, {list(dataset.shape)}, with {kind}")
    figures = {"data": path, "count": dataset.count, "shape": dataset.shape, "latents": asdict(latents)}
    captions = sum(1 for text in dataset.captions or () if text)
    figures |= {"condition": None if kind is None else asdict(kind), "captions": captions}
    return typer.echo(json.dumps(figures, indent=2, ensure_ascii=False))


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Any data set; its images may have different sizes.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A .zip, or a new folder for WebDataset shards.")],
    size: Annotated[
        str | None,
        typer.Option(
            help="64, or HEIGHTxWIDTH. [unchanged if all images share one size; else 64, or 32 for small images]"
        ),
    ] = None,
    crop: Annotated[CropName | None, typer.Option(help=CROP_HELP)] = None,
    channels: Annotated[
        int | None, typer.Option(help="Convert to 1 (grey) or 3 (RGB). [3 if any image is in colour]")
    ] = None,
    split: Split = "train",
    workers: Annotated[int, typer.Option(min=0, help="Processes to use.")] = os.cpu_count() or 1,
    skip_broken: SkipBroken = False,
    latents: Annotated[
        str | None,
        typer.Option(
            help="Write latents instead of images, made by this autoencoder: the folder or hub id of a pipeline."
        ),
    ] = None,
    text_encoder: Annotated[
        str | None,
        typer.Option(help="Also store the captions as this encoder reads them: minilm, a folder, or a hub id."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each caption to store. [all that the encoder takes]")
    ] = None,
) -> None:
    """Crop and resize images to one size, and write them or their latents, with their classes and captions."""
    from tcm.data.opening import open_pictures
    from tcm.data.prepare import Crop, check_target, survey, usual_form
    from tcm.text.condition import Texts
    from tcm.text.encoders import load_encoder

    if tokens is not None and text_encoder is None:
        raise TcmError(f"--tokens {tokens} needs --text-encoder; give both or neither")
    encoder = None if text_encoder is None else Texts.of(load_encoder(text_encoder), tokens)
    check_target(target, encoder)
    pictures = open_pictures(source, split)
    form = usual_form(survey(pictures), _parsed_size(size))
    form = replace(form, crop=form.crop if crop is None else Crop(crop), channels=channels or form.channels)
    if latents is not None:
        return _write_latents(pictures, form, target, skip_broken, workers, latents, encoder)
    return write_in_form(pictures, form, target, skip_broken, workers, encoder)


def _write_latents(
    source: Pictures | Dataset,
    form: Form,
    target: Path,
    skip_broken: bool,
    workers: int,
    vae: str,
    texts: Texts | None,
) -> None:
    """Write the latents of a source's images, and say which autoencoder made them."""
    from rich.console import Console
    from rich.progress import track

    from tcm.data.encoding import Encoders, unfinished, write_encoded
    from tcm.data.prepare import Preparation, prepared_images
    from tcm.foundation.devices import best_device
    from tcm.text.autoencoders import Latents

    if target.suffix:
        raise TcmError(f"{target}: latents are written into a folder; give a name without {target.suffix}")
    preparation, latents = Preparation(source, form), Latents.of(vae)
    if form.size is not None:
        latents.of_images((form.channels or 3, *form.size))
    if texts is not None and (source.annotations is None or source.annotations.texts is None):
        raise TcmError(f"--text-encoder {texts.encoder}: the images have no captions; leave it out")

    def images(start: int) -> Iterable[Prepared]:
        if start:
            _say(f"{unfinished(target)}: continuing after {start:,} images")
        rest = prepared_images(preparation, skip_broken, workers, start)
        console = Console(stderr=True)
        return track(rest, "encoding", preparation.count, completed=start, console=console, transient=True)

    encoders = Encoders(latents, texts, best_device())
    settings = {**preparation.settings(), "--skip-broken": str(skip_broken)}
    written, skipped = write_encoded(target, images, source.annotations, encoders, settings)
    _name_skipped(skipped)
    _say(f"{written:,} images ({form}), as {latents}: {target}")


def write_in_form(
    source: Pictures | Dataset,
    form: Form,
    target: Path,
    skip_broken: bool,
    workers: int,
    encoder: Texts | None = None,
) -> None:
    """Write the images of a source in one form, and say which form and what was left out."""
    from rich.console import Console
    from rich.progress import track

    from tcm.data.prepare import Preparation, prepared_images, write_prepared

    preparation = Preparation(source, form)
    images = prepared_images(preparation, skip_broken, workers)
    shown = track(images, "preparing", total=preparation.count, console=Console(stderr=True), transient=True)
    written, skipped = write_prepared(target, shown, preparation.annotations, encoder)
    _name_skipped(skipped)
    _say(f"{written:,} images ({form}): {target}")


def _parsed_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text)
    if match is None:
        raise TcmError(f"--size {text} is not a size; write 64, or 48x64 for height 48 and width 64")
    return int(match[1]), int(match[2] or match[1])


def _table(title: str, summary: Summary) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    channels, height, width = summary.shape
    table.add_row("images", f"{summary.count:,}")
    table.add_row("shape", f"{channels} × {height} × {width} (channels, height, width)")
    table.add_row("annotated with", "nothing" if summary.condition is None else str(summary.condition))
    for name, count in summary.class_counts[:20]:
        table.add_row(f"  {name}", f"{count:,} ({count / summary.count:.1%})")
    if len(summary.class_counts) > 20:
        counts = [count for _, count in summary.class_counts]
        table.add_row("  ...", f"from {min(counts):,} to {max(counts):,} images per class")
    if summary.captions:
        table.add_row("captions", f"{summary.captions:,}")
    table.add_row("mean", "  ".join(f"{value:+.4f}" for value in summary.mean) + "  (pixels in [-1, 1])")
    table.add_row("standard deviation", "  ".join(f"{value:.4f}" for value in summary.std))
    table.add_row("sigma_data", f"{summary.sigma_data:.4f}")
    table.add_row("duplicates", f"{summary.duplicates:,}")
    table.add_row("left out as broken", f"{len(summary.skipped):,}")
    return table


def _name_skipped(skipped: tuple[Broken, ...] | list[Broken]) -> None:
    for broken in skipped:
        _say(f"left out: {broken.reason}")


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, highlight=False, soft_wrap=True, markup=False)
