"""Every format holds the same pixels and labels: the truth is the array that was written."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import writers
from PIL import Image

from tcm.data import ArrayDataset, ClassLabels, Dataset, open_dataset
from tcm.data.arrays import save_npz
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes, Labels

IMAGES = writers.sample_pixels()
GREY = writers.sample_pixels(channels=1)
LABELS = writers.sample_labels()
Writer = Callable[[Path], Path]


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def save_npy(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


COLOUR: dict[str, Writer] = {
    "folder with labels.csv": lambda at: writers.write_files(at / "d", writers.with_csv(IMAGES, LABELS)),
    "folder in EDM's layout": lambda at: writers.write_files(at / "d", writers.with_edm_json(IMAGES, LABELS)),
    "zip with labels.csv": lambda at: writers.write_zip(at / "d.zip", writers.with_csv(IMAGES, LABELS)),
    "zip in EDM's layout": lambda at: writers.write_zip(
        at / "d.zip", writers.with_edm_json(IMAGES, LABELS), zipfile.ZIP_STORED
    ),
    "npz": lambda at: save(at / "d.npz", images=IMAGES, labels=LABELS),
    "npz, channels last": lambda at: save(at / "d.npz", arr_0=IMAGES.transpose(0, 2, 3, 1), arr_1=LABELS),
    "npz, keras": lambda at: save(at / "d.npz", x_train=IMAGES, y_train=LABELS[:, None].astype(np.uint8)),
    "npz, Fortran order": lambda at: save(at / "d.npz", images=np.asfortranarray(IMAGES), labels=LABELS),
    "CIFAR, python": lambda at: writers.write_cifar_python(at / "d", IMAGES, LABELS),
    "CIFAR, binary": lambda at: writers.write_cifar_binary(at / "d", IMAGES, LABELS),
    "shards": lambda at: writers.write_shards(at / "d", IMAGES, LABELS),
    "Hugging Face, saved": lambda at: writers.write_hugging_face(at / "d", IMAGES, LABELS),
    "Hugging Face, parquet": lambda at: writers.write_hugging_face(at / "d", IMAGES, LABELS, parquet=True),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def check(dataset: Dataset, images: np.ndarray, labels: np.ndarray | None) -> None:
    order = np.random.default_rng(1).permutation(len(images))
    read, condition = dataset.read(order)
    assert dataset.count == len(images)
    assert dataset.shape == images.shape[1:]
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, images[order])
    if labels is None:
        assert condition is None
        assert dataset.condition_kind is None
    else:
        assert isinstance(condition, Labels)
        assert condition.index.dtype == torch.int64
        np.testing.assert_array_equal(condition.index, labels[order])
    truth = ArrayDataset(images, None if labels is None else ClassLabels.of(labels, "the test"))
    assert dataset.content_hash() == truth.content_hash()


@pytest.mark.parametrize("memory_limit", [0, 2**30], ids=["decoded when read", "in memory"])
@pytest.mark.parametrize("write", COLOUR.values(), ids=COLOUR.keys())
def test_every_format_holds_the_same_pixels(write: Writer, memory_limit: int, tmp_path: Path) -> None:
    check(open_dataset(write(tmp_path), memory_limit=memory_limit), IMAGES, LABELS)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx(tmp_path: Path, zipped: bool) -> None:
    folder = writers.write_idx(tmp_path / "d", GREY, LABELS, zipped)
    check(open_dataset(folder), GREY, LABELS)
    check(open_dataset(next(folder.glob("*images*"))), GREY, LABELS)


def test_npy_has_no_labels_and_is_mapped(tmp_path: Path) -> None:
    check(open_dataset(save_npy(tmp_path / "d.npy", IMAGES)), IMAGES, None)
    check(open_dataset(save_npy(tmp_path / "e.npy", IMAGES.transpose(0, 2, 3, 1))), IMAGES, None)
    check(open_dataset(save_npy(tmp_path / "f.npy", GREY[:, 0])), GREY, None)


def test_class_folders_become_labels_in_sorted_order(tmp_path: Path) -> None:
    by_class = np.argsort(LABELS, kind="stable")
    files = {f"{writers.CLASSES[LABELS[place]]}/{place:03d}.png": writers.png(IMAGES[place]) for place in by_class}
    for path in (writers.write_files(tmp_path / "d", files), writers.write_zip(tmp_path / "d.zip", files)):
        dataset = open_dataset(path)
        check(dataset, IMAGES[by_class], LABELS[by_class])
        assert dataset.class_labels.names == writers.CLASSES


def test_a_single_folder_is_no_class(tmp_path: Path) -> None:
    files = {f"photos/{name}": data for name, data in writers.numbered(IMAGES).items()}
    check(open_dataset(writers.write_files(tmp_path / "d", files)), IMAGES, None)


def test_class_names_come_along(tmp_path: Path) -> None:
    assert (
        open_dataset(writers.write_hugging_face(tmp_path / "h", IMAGES, LABELS)).condition_kind.names == writers.CLASSES
    )
    assert (
        open_dataset(writers.write_files(tmp_path / "c", writers.with_csv(IMAGES, LABELS))).class_labels.names
        == writers.CLASSES
    )
    dataset = ArrayDataset(IMAGES, ClassLabels.of(LABELS, "the test", writers.CLASSES))
    save_npz(tmp_path / "d.npz", {"train": dataset, "test": dataset})
    assert open_dataset(tmp_path / "d.npz", split="test").condition_kind.names == writers.CLASSES


def test_without_labels(tmp_path: Path) -> None:
    check(open_dataset(writers.write_files(tmp_path / "d", writers.numbered(IMAGES))), IMAGES, None)
    check(open_dataset(writers.write_shards(tmp_path / "s", IMAGES, None)), IMAGES, None)
    files = {**writers.with_edm_json(IMAGES, LABELS), "dataset.json": b'{"labels": null}'}
    check(open_dataset(writers.write_zip(tmp_path / "d.zip", files)), IMAGES, None)


def test_splits_of_cifar(tmp_path: Path) -> None:
    folder = writers.write_cifar_python(tmp_path / "d", IMAGES, LABELS)
    (folder / "data_batch_2").rename(folder / "test_batch")
    check(open_dataset(folder, split="test"), IMAGES[12:], LABELS[12:])
    check(open_dataset(folder / "test_batch"), IMAGES[12:], LABELS[12:])
    with pytest.raises(TcmError, match="split 'val'"):
        open_dataset(folder, split="val")


def test_cifar_pickles_of_python_2_with_protocol_2_strings(tmp_path: Path) -> None:
    """Python 2 wrote its strings with opcodes that Python 3 no longer writes: take them from an assembled pickle."""
    pixels = IMAGES[:1].reshape(1, -1)
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels]K\x07au.")
    check(open_dataset(tmp_path), IMAGES[:1], np.array([7]))


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Attack(), b"labels": []}, protocol=2))
    with pytest.raises(TcmError, match=r"data_batch_1 .*eval.*nothing of it was run"):
        open_dataset(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_convert_arrays_as_pillow_does(tmp_path: Path, channels: int) -> None:
    source = IMAGES if channels == 1 else GREY
    pictures = [Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)) for image in source]
    truth = np.stack([np.atleast_3d(picture.convert("L" if channels == 1 else "RGB")) for picture in pictures])
    truth = truth.transpose(0, 3, 1, 2)
    np.savez(tmp_path / "d.npz", images=source)
    writers.write_files(tmp_path / "d", writers.numbered(source))
    check(open_dataset(tmp_path / "d.npz", channels=channels), truth, None)
    check(open_dataset(tmp_path / "d", channels=channels), truth, None)


def test_digits_are_bundled() -> None:
    digits = open_dataset("digits")
    assert (digits.count, digits.shape, digits.condition_kind) == (1797, (1, 8, 8), Classes(10))
    # The published description: 16 grey steps, and these numbers of each digit in the UCI test set.
    assert len(np.unique(digits.pixels(np.arange(1797)))) == 17
    np.testing.assert_array_equal(
        np.bincount(digits.class_labels.values), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    )
    first = np.array([0, 0, 5, 13, 9, 1, 0, 0])
    np.testing.assert_array_equal(digits.pixels(np.array([0]))[0, 0, 0], np.round(first * 255 / 16))


def test_hidden_files_and_archivers_shadows_are_no_images(tmp_path: Path) -> None:
    files = {
        **writers.numbered(IMAGES),
        "._00000.png": b"x",
        "__MACOSX/a.png": b"x",
        ".cache/b.png": b"x",
        "notes.txt": b"x",
    }
    check(open_dataset(writers.write_files(tmp_path / "d", files)), IMAGES, None)
    check(open_dataset(writers.write_zip(tmp_path / "d.zip", files)), IMAGES, None)
