"""Bring images of any sizes to one form, into a zip (EDM's layout) or WebDataset shards."""

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from tcm.data.caption_files import EMBEDDING, METADATA_JSONL
from tcm.data.caption_streams import embedding_bytes
from tcm.data.captions import AT_ONCE
from tcm.data.dataset import Annotations, Broken, Dataset
from tcm.data.decode import BrokenImage, declared_form, picture_of, png_of
from tcm.data.labels import DATASET_JSON
from tcm.data.loader import read_ahead
from tcm.data.pictures import Pictures
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, new_folder, write_text
from tcm.text.condition import Texts

_PER_SHARD = 10_000


class Crop(StrEnum):
    """How a picture is brought to the wanted shape."""

    CENTER = "center"
    """EDM's: the largest centred square, scaled by LANCZOS (for other shapes the largest centred rectangle)."""
    DHARIWAL = "dhariwal"
    """ADM's, which ImageNet-64 needs: halved by BOX while twice too large, scaled by BICUBIC, the centre cut out."""
    NONE = "none"
    """Scaled by LANCZOS; a picture of another shape is an error."""


@dataclass(frozen=True)
class Form:
    """The form that all pictures get; a size of None keeps each as it is (then all must already agree)."""

    size: tuple[int, int] | None = None
    """Height and width."""
    crop: Crop = Crop.NONE
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise TcmError(f"size={self.size} is too small; use at least 1×1")
        if self.size is None and self.crop is not Crop.NONE:
            raise TcmError(f"crop={self.crop.value} needs a size; pass --size")
        if self.crop is Crop.DHARIWAL and self.size is not None and self.size[0] != self.size[1]:
            raise TcmError(f"size={self.size} is not square, as crop=dhariwal needs; use a square, or crop=center")
        if self.channels not in (None, 1, 3):
            raise TcmError(f"channels={self.channels} is not supported; use 1 (grey) or 3 (RGB)")

    def __str__(self) -> str:
        size = "as they are" if self.size is None else f"scaled to {self.size[0]}×{self.size[1]}"
        cropped = {Crop.NONE: "", Crop.CENTER: "cropped to the centre, "}.get(
            self.crop, f"cropped ({self.crop.value}), "
        )
        colour = {1: ", grey", 3: ", in colour"}.get(self.channels or 0, "")
        return f"{cropped}{size}{colour}"

    def apply(self, picture: Image.Image, name: str) -> Image.Image:
        """Crop, scale and convert one picture."""
        if self.channels is not None:
            picture = picture.convert("L" if self.channels == 1 else "RGB")
        if self.size is None:
            return picture
        height, width = self.size
        if self.crop is Crop.DHARIWAL:
            return dhariwal_crop(picture, height)
        if self.crop is Crop.CENTER:
            picture = center_crop(picture, height, width)
        elif picture.width * height != picture.height * width:
            raise TcmError(
                f"{name} is {picture.width}×{picture.height}, which does not have the aspect ratio of "
                f"{width}×{height}; pass --crop center"
            )
        return picture.resize((width, height), Image.Resampling.LANCZOS)


def center_crop(picture: Image.Image, height: int, width: int) -> Image.Image:
    """Cut out the largest centred part with the shape height : width; for a square that is EDM's centre crop."""
    across = min(picture.width, picture.height * width // height)
    down = min(picture.height, picture.width * height // width)
    across, down = max(across, 1), max(down, 1)
    left, top = (picture.width - across) // 2, (picture.height - down) // 2
    return picture.crop((left, top, left + across, top + down))


def dhariwal_crop(picture: Image.Image, size: int) -> Image.Image:
    """Scale and cut as ADM (Dhariwal and Nichol, 2021) did: BOX halvings, BICUBIC to `size`, the centre."""
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    scaled = (round(picture.width * scale), round(picture.height * scale))
    picture = picture.resize(scaled, Image.Resampling.BICUBIC)
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    return picture.crop((left, top, left + size, top + size))


@dataclass(frozen=True)
class Survey:
    """What the pictures of a source have in common, from their headers alone."""

    channels: int
    """3 if any picture is in colour, else 1."""
    same_channels: bool
    size: tuple[int, int] | None
    """Height and width, if all have the same."""
    shortest: int
    """The shortest side of any picture."""


def survey(source: Pictures | Dataset) -> Survey:
    """Look at the headers of all pictures; a file without one is skipped here, and reported when it is read."""
    if isinstance(source, Dataset):
        channels, *size = source.shape
        return Survey(channels, True, (size[0], size[1]), min(size))
    forms = []
    for index, name in enumerate(source.names):
        with suppress(BrokenImage):
            forms.append(declared_form(source.data(index), name))
    if not forms:
        raise TcmError(f"none of {len(source.names)} images can be read; the first one is {source.names[0]}")
    colours = {channels for channels, _, _ in forms}
    sizes = {(height, width) for _, height, width in forms}
    shortest = min(min(size) for size in sizes)
    return Survey(max(colours), len(colours) == 1, sizes.pop() if len(sizes) == 1 else None, shortest)


def usual_form(found: Survey, size: tuple[int, int] | None = None) -> Form:
    """The form for pictures of which nothing is said: colour if any is, their own size if they share one.

    Others become squares of 64 pixels, or of 32 where one of them is smaller than 64.
    """
    if size is None and found.size is None:
        size = (64, 64) if found.shortest >= 64 else (32, 32)
    return Form(size, Crop.NONE if size is None else Crop.CENTER, found.channels)


def one_small_form(found: Survey) -> Form:
    """The form for pictures that were not made for a network: squares that train within hours on a CPU."""
    return Form((32, 32), Crop.CENTER, found.channels)


@dataclass(frozen=True)
class Prepared:
    """One prepared image: its number and name in the source, and its PNG, or why there is none."""

    number: int
    name: str
    png: bytes = b""
    mode_and_size: tuple[str, int, int] | None = None
    broken: Broken | None = None


class Preparation(TorchDataset[Prepared | TcmError]):
    """The prepared images of a source, each made when it is asked for; iterate with `prepared_images`."""

    def __init__(self, source: Pictures | Dataset, form: Form):
        self._source = source
        self._form = form
        self.count = len(source.names) if isinstance(source, Pictures) else source.count
        found = source.annotations
        if found is not None and found.classes is None and found.texts is None:
            raise TcmError(
                f"the images come with {found.kind}, but a .zip and shards can hold only classes and captions; use the "
                "data set as it is, and resize or crop in its own class"
            )
        self.annotations = found

    def settings(self) -> dict[str, str]:
        """Which images they are, by their number and names, and the form that they get."""
        names = "\n".join(self._source.names) if isinstance(self._source, Pictures) else ""
        digest = hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()
        return {"number of images": str(self.count), "list of names": digest[:12], "form": str(self._form)}

    def __getitem__(self, number: int) -> Prepared | TcmError:
        name = self._source.names[number] if isinstance(self._source, Pictures) else f"image {number}"
        try:
            if isinstance(self._source, Pictures):
                picture = self._source.picture(number)
            else:
                picture = picture_of(self._source.pixels(np.array([number]))[0])
            picture = self._form.apply(picture, name)
        except BrokenImage as error:
            return Prepared(number, name, broken=Broken(name, error.problem))
        except TcmError as error:  # a value, since an error raised in a worker comes back wrapped in a traceback
            return error
        return Prepared(number, name, png_of(picture), (picture.mode, *picture.size))


def prepared_images(
    preparation: Preparation, skip_broken: bool = False, workers: int = 0, start: int = 0
) -> Iterator[Prepared]:
    """Yield the prepared images from number `start` on in the source's order, made by `workers` processes; all must
    agree in shape."""
    first = None
    with closing(read_ahead(preparation, range(start, preparation.count), workers)) as ahead:
        for prepared in ahead:
            if isinstance(prepared, TcmError):
                raise prepared
            if prepared.broken is None:
                first = first or prepared
                _check_agreement(prepared, first)
            elif not skip_broken:
                raise BrokenImage(prepared.broken.reason)
            yield prepared


def write_prepared(
    target: str | Path, images: Iterable[Prepared], annotations: Annotations | None, encoder: Texts | None = None
) -> tuple[int, list[Broken]]:
    """Write prepared images to a .zip, or as shards into a new folder; either appears whole or not at all.

    Shards can hold the embeddings of the captions too, as an `encoder` reads them. Return the number of images written
    and those left out.
    """
    target = Path(target)
    check_target(target, encoder)
    if encoder is not None and (annotations is None or annotations.texts is None):
        raise TcmError(f"the images have no captions for the text encoder {encoder.encoder} to read; leave it out")
    if target.suffix == ".zip":
        with atomic_write(target) as file, zipfile.ZipFile(file, "w") as archive:
            return _fill_zip(archive, images, annotations)
    with new_folder(target) as folder:
        return _fill_shards(folder, images, annotations, encoder)


def check_target(target: Path, encoder: Texts | None = None) -> None:
    """Refuse a target that exists, or whose name is neither a zip's nor a folder's."""
    if encoder is not None and target.suffix == ".zip":
        raise TcmError(f"{target}: only shards hold the embeddings of captions; name a folder (no ending)")
    if target.suffix not in ("", ".zip"):
        raise TcmError(f"{target} ends in {target.suffix}; name a .zip, or a folder (no ending) for shards")
    if target.exists():
        raise TcmError(f"{target} exists already; remove it or choose another name")


def prepare_dataset(
    source: Pictures | Dataset, target: str | Path, form: Form, *, skip_broken: bool = False, workers: int = 0
) -> tuple[int, list[Broken]]:
    """Bring a source's images to one form and write them: `prepared_images` into `write_prepared`.

    >>> prepare_dataset(open_pictures("photos/"), "photos-64.zip", Form((64, 64), Crop.CENTER))  # doctest: +SKIP
    """
    preparation = Preparation(source, form)
    return write_prepared(target, prepared_images(preparation, skip_broken, workers), preparation.annotations)


def _fill_zip(
    archive: zipfile.ZipFile, images: Iterable[Prepared], annotations: Annotations | None
) -> tuple[int, list[Broken]]:
    skipped: list[Broken] = []
    labels, texts = (None, None) if annotations is None else (annotations.classes, annotations.texts)
    listed: list[tuple[str, int]] = []
    captions: list[str] = []
    written = 0
    for written, image in enumerate(_without_broken(images, skipped), start=1):
        name = f"{(written - 1) // 1000:05d}/img{written - 1:08d}.png"
        archive.writestr(zipfile.ZipInfo(name), image.png)  # ZipInfo's date is fixed: the same images, the same zip
        if labels is not None:
            listed.append((name, int(labels.values[image.number])))
        if texts is not None:
            captions.append(json.dumps({"file_name": name, "text": texts[image.number]}, ensure_ascii=False))
    _check_written(written, skipped)
    content = {"labels": None} if labels is None else {"labels": listed, "class_names": labels.names}
    archive.writestr(zipfile.ZipInfo(DATASET_JSON), json.dumps(content))
    if texts is not None:
        archive.writestr(zipfile.ZipInfo(METADATA_JSONL), "\n".join(captions) + "\n")
    return written, skipped


def _fill_shards(
    folder: Path, images: Iterable[Prepared], annotations: Annotations | None, encoder: Texts | None
) -> tuple[int, list[Broken]]:
    skipped: list[Broken] = []
    labels = None if annotations is None else annotations.classes
    usable = _with_annotations(_without_broken(images, skipped), annotations, encoder)
    written = 0
    while chunk := list(islice(usable, _PER_SHARD)):
        with (
            atomic_write(folder / f"shard-{written // _PER_SHARD:06d}.tar") as file,
            tarfile.open(fileobj=file, mode="w") as shard,
        ):
            for files in chunk:
                for suffix, data in files.items():
                    _add(shard, f"{written:08d}.{suffix}", data)
                written += 1
    _check_written(written, skipped)
    described: dict[str, object] = {"count": written, "class_names": [] if labels is None else labels.names}
    if encoder is not None:
        described["text"] = asdict(Texts.of(encoder.load_encoder(), encoder.tokens))
    write_text(folder / DATASET_JSON, json.dumps(described))
    return written, skipped


def _with_annotations(
    images: Iterator[Prepared], annotations: Annotations | None, encoder: Texts | None
) -> Iterator[dict[str, bytes]]:
    """The files of each sample of a shard, by their endings."""
    labels, texts = (None, None) if annotations is None else (annotations.classes, annotations.texts)
    while some := list(islice(images, AT_ONCE)):
        files = [{"png": image.png} for image in some]
        captions = [] if texts is None else [texts[image.number] for image in some]
        for sample, image in zip(files, some, strict=True):
            if labels is not None:
                sample["cls"] = str(labels.values[image.number]).encode()
        for sample, caption in zip(files, captions, strict=False):
            sample["txt"] = caption.encode("utf-8", "surrogatepass")
        if encoder is not None:
            found = encoder.load_encoder().encode(captions, encoder.tokens, warn=False)
            for sample, tokens, mask in zip(files, found.tokens, found.mask, strict=True):
                sample[EMBEDDING] = embedding_bytes(tokens, mask)
        yield from files


def _without_broken(images: Iterable[Prepared], skipped: list[Broken]) -> Iterator[Prepared]:
    for image in images:
        if image.broken:
            skipped.append(image.broken)
        else:
            yield image


def _check_written(written: int, skipped: list[Broken]) -> None:
    if not written:
        raise TcmError(f"none of {len(skipped)} images can be read; the first one: {skipped[0].reason}")


def _add(shard: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    shard.addfile(entry, io.BytesIO(data))


def _check_agreement(prepared: Prepared, first: Prepared) -> None:
    if prepared.mode_and_size != first.mode_and_size:
        raise TcmError(
            f"{prepared.name} is {_described(prepared)}, but {first.name} is {_described(first)}; "
            "pass --size, --crop and --channels to bring all to one form"
        )


def _described(prepared: Prepared) -> str:
    mode, width, height = prepared.mode_and_size or ("?", 0, 0)
    return f"{width}×{height} {'grey' if mode == 'L' else 'in colour'}"
