"""Where samples go: a folder of PNGs, one grid, an array, or a zip."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tcm.data import save_grid
from tcm.data.decode import picture_of, png_of
from tcm.evaluation.sharing import ALONE, gather_rows, share
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write
from tcm.foundation.processes import Processes

SUFFIXES = (".png", ".npz", ".zip")
# Small images are enlarged in a grid until it is about this wide.
GRID_WIDTH = 640


def check_output(path: Path) -> None:
    """Refuse a name that does not say which format to write, before any image is drawn."""
    if path.suffix and path.suffix not in SUFFIXES:
        raise TcmError(f"out={path} has an unknown ending; use a folder, or a file that ends in {', '.join(SUFFIXES)}")
    if not path.suffix and path.exists() and not path.is_dir():
        raise TcmError(f"out={path} is a file; name a folder, or a file that ends in {', '.join(SUFFIXES)}")


def make_room(path: Path, overwrite: bool) -> None:
    """Refuse to mix new samples with those of a folder, or to replace an archive, unless they may be overwritten.

    Of a folder only what is named like a sample is removed. A grid is a picture to look at, and is replaced.
    """
    if path.suffix == ".png" or not path.exists():
        return
    old = [path] if path.suffix else sorted(path.glob("*.png"))
    if old and not overwrite:
        what = "exists" if path.suffix else f"holds other images, such as {old[0].name}"
        raise TcmError(f"out={path} {what}; name another one, or pass --overwrite to replace what is there")
    for file in old:
        if not path.suffix and file.stem.isdecimal():
            file.unlink()


def write_samples(
    path: Path,
    images: Iterable[Tensor],
    seeds: Sequence[int],
    shape: tuple[int, int, int],
    processes: Processes = ALONE,
) -> None:
    """Write this process's uint8 batches of `shape`, in the order of its share of `seeds`: the same pixels in any form.

    `out/` gets one PNG per image, named by its seed; `.png` a grid; `.npz` the arrays `images` [n, C, H, W] and
    `seeds`; `.zip` the PNGs without a second compression.
    """
    if not path.suffix:
        path.mkdir(parents=True, exist_ok=True)
        _write_folder(path, images, share(processes, seeds))
        return
    own = torch.cat([torch.empty(0, *shape, dtype=torch.uint8), *images])
    together = gather_rows(processes, own, len(seeds))
    if not processes.first:
        return
    if path.suffix == ".png":
        save_grid(path, together, scale=max(1, GRID_WIDTH // (together.shape[-1] * round(len(seeds) ** 0.5))))
    elif path.suffix == ".npz":
        with atomic_write(path) as file:
            np.savez(file, images=together.numpy(), seeds=np.asarray(seeds))
    else:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for seed, pixels in zip(seeds, together, strict=True):
                archive.writestr(zipfile.ZipInfo(png_name(seed)), png_of(picture_of(pixels.numpy())))


def _write_folder(folder: Path, images: Iterable[Tensor], seeds: Sequence[int]) -> None:
    remaining = iter(seeds)
    for batch in images:
        for pixels in batch:
            (folder / png_name(next(remaining))).write_bytes(png_of(picture_of(pixels.numpy())))


def png_name(seed: int) -> str:
    """The file name of a seed's image."""
    return f"{seed:06d}.png"
