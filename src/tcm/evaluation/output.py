"""Where samples go: a folder of PNGs, one grid, an array, or a zip."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence, Set
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tcm.data import save_grid
from tcm.data.decode import picture_of, png_of
from tcm.data.grid import captioned_grid, save_picture
from tcm.evaluation.prompts import Prompted
from tcm.evaluation.sharing import ALONE, gather_rows, share
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, check_writable, writing
from tcm.foundation.processes import Processes

SUFFIXES = (".png", ".npz", ".zip")
SAMPLE_NAME = re.compile(r"(\d{2,}-[^/]*/)?\d{6,}\.png")
"""Of a sample in a folder: 000007.png, or 02-red-apple/000007.png."""
# Small images are enlarged in a grid until it is about this wide.
GRID_WIDTH = 640
SMALLEST_CELL = 96  # so that a prompt fits below its image


def check_output(path: Path) -> None:
    """Refuse a name that does not say which format to write, or a place that cannot be written to, before any image is
    drawn."""
    if path.suffix and path.suffix not in SUFFIXES:
        raise TcmError(f"out={path} has an unknown ending; use a folder, or a file that ends in {', '.join(SUFFIXES)}")
    if not path.suffix and path.exists() and not path.is_dir():
        raise TcmError(f"out={path} is a file; name a folder, or a file that ends in {', '.join(SUFFIXES)}")
    check_writable(path / png_name(0) if path.is_dir() else path)  # a folder is filled, not replaced


def check_room(path: Path, overwrite: bool) -> None:
    """Refuse to mix new samples with other images of a folder, or to replace an archive, unless that is wanted.

    A grid is a picture to look at, and is replaced.
    """
    if path.suffix == ".png" or not path.exists():
        return
    old = [path] if path.suffix else sorted([*path.glob("*.png"), *path.glob("*/*.png")])
    if old and not overwrite:
        what = "exists" if path.suffix else f"holds other images, such as {old[0].name}"
        raise TcmError(f"out={path} {what}; name another one, or pass --overwrite to replace what is there")


def write_samples(
    path: Path,
    images: Iterable[Tensor],
    seeds: Sequence[int],
    shape: tuple[int, int, int],
    processes: Processes = ALONE,
    prompts: Sequence[Prompted] | None = None,
) -> None:
    """Write this process's uint8 batches of `shape`, in the order of its share of `seeds`: the same pixels in any form.

    `out/` gets one PNG per image, named by its seed, and loses those of earlier samples; `.png` a grid; `.npz` the
    arrays `images` [n, C, H, W] and `seeds`; `.zip` the PNGs without a second compression. The images of `prompts` are
    in a folder for each prompt, and a grid says what they are.
    """
    names = [png_name(seed) for seed in seeds] if prompts is None else [one.file for one in prompts]
    if not path.suffix:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            _write_folder(path, images, share(processes, names))
            if processes.first:
                _remove_earlier(path, set(names))
        return
    own = torch.cat([torch.empty(0, *shape, dtype=torch.uint8), *images])
    together = gather_rows(processes, own, len(seeds))
    if not processes.first:
        return
    if path.suffix == ".png":
        _write_grid(path, together, prompts)
    elif path.suffix == ".npz":
        texts = {} if prompts is None else {"prompts": np.array([one.prompt for one in prompts])}
        with atomic_write(path) as file:
            np.savez(file, allow_pickle=False, images=together.numpy(), seeds=np.asarray(seeds), **texts)
    else:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, pixels in zip(names, together, strict=True):
                archive.writestr(zipfile.ZipInfo(name), png_of(picture_of(pixels.numpy())))


def _write_grid(path: Path, images: Tensor, prompts: Sequence[Prompted] | None) -> None:
    """One row for each prompt, or a square if there is one image for each."""
    if prompts is None:
        save_grid(path, images, scale=max(1, GRID_WIDTH // (images.shape[-1] * round(len(images) ** 0.5))))
        return
    each = len({one.seed for one in prompts})
    columns = each if each > 1 else ceil(len(prompts) ** 0.5)
    captions = [one.prompt if index % each == 0 else "" for index, one in enumerate(prompts)]
    scale = max(1, max(GRID_WIDTH // columns, SMALLEST_CELL) // images.shape[-1])
    save_picture(path, captioned_grid(images, captions, columns, scale))


def _write_folder(folder: Path, images: Iterable[Tensor], names: Sequence[str]) -> None:
    remaining = iter(names)
    for batch in images:
        for pixels in batch:
            file = folder / next(remaining)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(png_of(picture_of(pixels.numpy())))


def _remove_earlier(folder: Path, names: Set[str]) -> None:
    """Remove the samples that were there before, and nothing else."""
    for file in [*folder.glob("*.png"), *folder.glob("*/*.png")]:
        name = file.relative_to(folder).as_posix()
        if SAMPLE_NAME.fullmatch(name) and name not in names:
            file.unlink()


def png_name(seed: int) -> str:
    """The file name of a seed's image."""
    return f"{seed:06d}.png"
