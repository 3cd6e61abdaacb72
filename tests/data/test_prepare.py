"""Crops and resampling against values that can be worked out, and what is written against what is read again."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import writers
from PIL import Image

from tcm.data import open_dataset, prepare_dataset
from tcm.data.decode import picture_of
from tcm.data.opening import open_pictures
from tcm.data.prepare import Crop, Form, center_crop, dhariwal_crop, survey, usual_form
from tcm.foundation.errors import TcmError

IMAGES = writers.sample_pixels(12, height=16, width=16)
LABELS = writers.sample_labels(12)


def rows(picture: Image.Image) -> np.ndarray:
    return np.atleast_3d(np.asarray(picture))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 14), (14, 9), (7, 100)])
def test_center_crop_takes_the_largest_centred_square(height: int, width: int) -> None:
    image = writers.sample_pixels(1, 3, height, width)[0].transpose(1, 2, 0)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    cropped = rows(center_crop(Image.fromarray(image), 64, 64))
    np.testing.assert_array_equal(cropped, image[top : top + side, left : left + side])


def test_center_crop_keeps_the_wanted_shape() -> None:
    picture = Image.new("RGB", (100, 100))
    assert center_crop(picture, 48, 64).size == (100, 75)
    assert center_crop(picture, 64, 48).size == (75, 100)


def test_dhariwal_crop_halves_by_means_of_blocks() -> None:
    """At a power of two times the size only BOX halvings happen: block means, rounded up to four times."""
    image = writers.sample_pixels(1, 3, 64, 64)[0].transpose(1, 2, 0)
    mean = image.astype(float)
    while len(mean) > 16:
        mean = mean.reshape(len(mean) // 2, 2, len(mean) // 2, 2, 3).mean(axis=(1, 3))
    assert np.abs(rows(dhariwal_crop(Image.fromarray(image), 16)) - mean).max() <= 2.0


@pytest.mark.parametrize("size", [(640, 480), (333, 500), (64, 64), (40, 50), (129, 127)])
def test_dhariwal_crop_follows_its_description(size: tuple[int, int]) -> None:
    picture = picture_of(writers.sample_pixels(1, 3, size[1], size[0])[0])
    cropped = dhariwal_crop(picture, 64)
    assert cropped.size == (64, 64)
    halvings = int(np.log2(min(size) / 64)) if min(size) >= 128 else 0
    for _ in range(halvings):
        picture = picture.resize((picture.size[0] // 2, picture.size[1] // 2), Image.BOX)
    factor = 64 / min(picture.size)
    picture = picture.resize((round(picture.size[0] * factor), round(picture.size[1] * factor)), Image.BICUBIC)
    top, left = (picture.size[1] - 64) // 2, (picture.size[0] - 64) // 2
    np.testing.assert_array_equal(rows(cropped), rows(picture)[top : top + 64, left : left + 64])


def mixed_folder(at: Path) -> Path:
    pictures = {
        "cat/a.png": writers.png(writers.sample_pixels(1, 3, 40, 60)[0]),
        "cat/b.png": writers.png(writers.sample_pixels(1, 1, 33, 20)[0]),
        "dog/c.png": writers.png(writers.sample_pixels(1, 3, 64, 64)[0]),
    }
    return writers.write_files(at / "mixed", pictures)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("target", ["out.zip", "out"])
@pytest.mark.parametrize("crop", [Crop.CENTER, Crop.DHARIWAL])
def test_mixed_images_become_one_data_set(tmp_path: Path, crop: Crop, target: str, workers: int) -> None:
    folder = mixed_folder(tmp_path)
    form = Form((16, 16), crop, 3)
    assert prepare_dataset(open_pictures(folder), tmp_path / target, form, workers=workers) == (3, [])
    dataset = open_dataset(tmp_path / target)
    assert (dataset.count, dataset.shape, dataset.condition_kind.names) == (3, (3, 16, 16), ("cat", "dog"))
    assert dataset.class_labels.values.tolist() == [0, 0, 1]
    with Image.open(folder / "cat" / "a.png") as picture:
        if crop is Crop.CENTER:
            truth = picture.crop((10, 0, 50, 40)).resize((16, 16), Image.LANCZOS)
        else:
            truth = picture.resize((30, 20), Image.BOX).resize((24, 16), Image.BICUBIC).crop((4, 0, 20, 16))
    np.testing.assert_array_equal(dataset.pixels(np.array([0]))[0], rows(truth).transpose(2, 0, 1))


@pytest.mark.parametrize("target", ["out.zip", "out"])
def test_a_copy_without_changes_has_the_same_content(tmp_path: Path, target: str) -> None:
    np.savez(tmp_path / "d.npz", images=IMAGES, labels=LABELS, class_names=np.array(writers.CLASSES))
    source = open_dataset(tmp_path / "d.npz")
    prepare_dataset(source, tmp_path / target, Form())
    copy = open_dataset(tmp_path / target)
    assert copy.content_hash() == source.content_hash()
    assert copy.condition_kind.names == writers.CLASSES


def test_the_zip_has_the_layout_of_edm(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=IMAGES, labels=LABELS)
    prepare_dataset(open_dataset(tmp_path / "d.npz"), tmp_path / "out.zip", Form())
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        labels = json.loads(archive.read("dataset.json"))["labels"]
        assert labels == [[f"00000/img{number:08d}.png", number % 3] for number in range(12)]
        assert sorted(archive.namelist()) == sorted([name for name, _ in labels] + ["dataset.json"])
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def test_the_same_images_give_the_same_bytes(tmp_path: Path) -> None:
    folder = mixed_folder(tmp_path)
    form = Form((16, 16), Crop.CENTER, 1)
    for name, workers in (("1.zip", 0), ("2.zip", 3)):
        prepare_dataset(open_pictures(folder), tmp_path / name, form, workers=workers)
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()


@pytest.mark.parametrize("target", ["out.zip", "out"])
@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_stop_it_or_are_left_out(tmp_path: Path, target: str, workers: int) -> None:
    folder = mixed_folder(tmp_path)
    (folder / "cat" / "b.png").write_bytes(b"broken")
    form = Form((16, 16), Crop.CENTER, 3)
    with pytest.raises(TcmError, match=r"^cat/b\.png cannot be read"):
        prepare_dataset(open_pictures(folder), tmp_path / target, form, workers=workers)
    assert os.listdir(tmp_path) == ["mixed"]
    count, skipped = prepare_dataset(open_pictures(folder), tmp_path / target, form, skip_broken=True, workers=workers)
    assert (count, [broken.name for broken in skipped]) == (2, ["cat/b.png"])
    dataset = open_dataset(tmp_path / target)
    assert dataset.class_labels.values.tolist() == [0, 1]


def test_refusals(tmp_path: Path) -> None:
    pictures = open_pictures(mixed_folder(tmp_path))
    for form, problem in (
        (Form((16, 16)), "pass --crop center"),
        (Form(), r"cat/b\.png is 20×33 grey, but cat/a\.png is 60×40 in colour; pass --size"),
        (Form((16, 16), Crop.CENTER), r"b\.png is 16×16 grey"),
    ):
        with pytest.raises(TcmError, match=problem):
            prepare_dataset(pictures, tmp_path / "out.zip", form)
    with pytest.raises(TcmError, match="exists already"):
        prepare_dataset(pictures, tmp_path / "mixed", Form((16, 16), Crop.CENTER, 3))
    with pytest.raises(TcmError, match=r"ends in \.npz"):
        prepare_dataset(pictures, tmp_path / "out.npz", Form((16, 16), Crop.CENTER, 3))
    for size, crop, channels in (
        ((0, 4), Crop.NONE, None),
        (None, Crop.CENTER, None),
        ((4, 5), Crop.DHARIWAL, None),
        (None, Crop.NONE, 4),
    ):
        with pytest.raises(TcmError):
            Form(size, crop, channels)


def picture_files(folder: Path, *pictures: Image.Image) -> Path:
    folder.mkdir()
    for number, picture in enumerate(pictures):
        picture.save(folder / f"{number}.png")
    return folder


GREY, COLOUR = Image.new("L", (50, 40)), Image.new("RGB", (70, 90), "red")


@pytest.mark.parametrize(
    ("pictures", "form"),
    [
        ((GREY, GREY), Form(None, Crop.NONE, 1)),
        ((COLOUR, COLOUR), Form(None, Crop.NONE, 3)),
        ((GREY, COLOUR), Form((32, 32), Crop.CENTER, 3)),
        ((COLOUR, COLOUR.resize((80, 64))), Form((64, 64), Crop.CENTER, 3)),
        ((GREY.convert("LA"), GREY), Form(None, Crop.NONE, 1)),
        ((GREY.convert("RGBA"), GREY), Form(None, Crop.NONE, 3)),
        ((COLOUR.convert("P"), GREY.resize((70, 90))), Form(None, Crop.NONE, 3)),
    ],
)
def test_the_usual_form(tmp_path: Path, pictures: tuple[Image.Image, ...], form: Form) -> None:
    """Colour if any picture is; their own size if they share one, else a square that is no larger than all of them."""
    source = open_pictures(picture_files(tmp_path / "pictures", *pictures))
    assert usual_form(survey(source)) == form
    prepare_dataset(source, tmp_path / "out.zip", form)
    assert open_dataset(tmp_path / "out.zip").shape[0] == form.channels


def test_broken_files_do_not_stop_a_survey(tmp_path: Path) -> None:
    folder = picture_files(tmp_path / "pictures", COLOUR)
    (folder / "broken.png").write_bytes(b"nothing")
    assert survey(open_pictures(folder)).size == (90, 70)
    (folder / "0.png").unlink()
    with pytest.raises(TcmError, match="none of 1 images can be read"):
        survey(open_pictures(folder))
