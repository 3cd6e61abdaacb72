"""What is wrong with the data is said in one line that names the file and the remedy."""

import gzip
import io
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import writers

from tcm.data import open_dataset
from tcm.foundation.errors import TcmError, TcmWarning

IMAGES = writers.sample_pixels(6, height=8, width=8)
FILES = writers.numbered(IMAGES)


def both(at: Path, files: dict[str, bytes]) -> list[Path]:
    return [writers.write_files(at / "d", files), writers.write_zip(at / "d.zip", files)]


def refuse(path: Path, *parts: str, **options: object) -> None:
    with pytest.raises(TcmError) as caught:
        open_dataset(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_mixed_sizes(tmp_path: Path) -> None:
    files = {**FILES, "00003.png": writers.png(IMAGES[0, :, :6])}
    for path in both(tmp_path, files):
        refuse(path, "00003.png is 8×6", "00000.png is 8×8", "tcm data prepare")


def test_mixed_channels(tmp_path: Path) -> None:
    for path in both(tmp_path, {**FILES, "00003.png": writers.png(IMAGES[0, :1])}):
        refuse(path, "00003.png is grey", "channels=1 or 3")
        assert open_dataset(path, channels=3).shape == (3, 8, 8)


@pytest.mark.parametrize("memory_limit", [0, 2**30])
def test_broken_images_are_named_or_left_out_with_a_report(tmp_path: Path, memory_limit: int) -> None:
    files = {**FILES, "00001.png": FILES["00001.png"][:90], "00004.png": b"nonsense", "00005.png": b""}
    for path in both(tmp_path, files):
        with pytest.raises(TcmError, match=r"00001\.png cannot be read .*--skip-broken"):
            open_dataset(path, memory_limit=memory_limit).read(np.arange(6))
        with pytest.warns(TcmWarning, match=r"left out 3 of 6 images: 00001\.png, 00004\.png, 00005\.png"):
            dataset = open_dataset(path, skip_broken=True, memory_limit=memory_limit)
        assert [broken.name for broken in dataset.skipped] == ["00001.png", "00004.png", "00005.png"]
        np.testing.assert_array_equal(dataset.read(np.arange(3))[0], IMAGES[[0, 2, 3]])


def test_labels_stay_with_their_images_when_some_are_left_out(tmp_path: Path) -> None:
    files = {f"{'ab'[number % 2]}/{number}.png": data for number, data in enumerate(FILES.values())}
    files["a/2.png"] = b""
    with pytest.warns(TcmWarning, match="left out 1"):
        dataset = open_dataset(writers.write_files(tmp_path / "d", files), skip_broken=True)
    assert dataset.class_labels.values.tolist() == [0, 0, 1, 1, 1]


def test_all_broken(tmp_path: Path) -> None:
    for path in both(tmp_path, {"a.png": b"", "b.png": b""}):
        refuse(path, "none of 2 images", skip_broken=True)


def test_labels_missing_for_some(tmp_path: Path) -> None:
    for path in both(tmp_path / "1", {"a/0.png": FILES["00000.png"], "1.png": FILES["00001.png"]}):
        refuse(path, "1.png is not in a class folder")
    for path in both(tmp_path / "2", {**FILES, "labels.csv": b"file,label\n00000.png,3\n"}):
        refuse(path, "labels.csv has no label for 00001.png")
    for path in both(tmp_path / "3", {**FILES, "dataset.json": b'{"labels": [["00000.png", 3]]}'}):
        refuse(path, "dataset.json has no label for 00001.png")
    more = b"file,label\n" + b"".join(f"{name},1\n".encode() for name in [*FILES, "gone.png"])
    for path in both(tmp_path / "4", {**FILES, "labels.csv": more}):
        refuse(path, "names gone.png, which does not exist")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for number in range(1, 5):
        (tmp_path / str(number)).mkdir()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("dataset.json", b"{", "not valid JSON"),
        ("dataset.json", b"[" * 100_000, "not valid JSON"),
        ("dataset.json", b"[1]", "must be an object"),
        ("dataset.json", b'{"labels": [["00000.png", 0.5]]}', "integer"),
        ("dataset.json", b'{"labels": [["00000.png", true]]}', "integer"),
        ("dataset.json", b'{"labels": {"00000.png": -1}}', "labels run from -1"),
        ("dataset.json", b'{"labels": {"00000.png": 99999999999999999999999}}', "integer"),
        ("dataset.json", b'{"labels": {"00000.png": 1}, "class_names": ["a"]}', "label 1 has no name"),
        ("labels.csv", b"", "file,label"),
        ("labels.csv", b"name;class\n00000.png;1\n", "file,label"),
        ("labels.csv", b"file,label\n00000.png,\n", "empty label"),
        ("labels.csv", b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_label_files(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    for path in both(tmp_path, {"00000.png": FILES["00000.png"], name: content}):
        refuse(path, name, problem)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "empty holds no images")
    refuse(writers.write_zip(tmp_path / "e.zip", {}), "e.zip holds no images")
    refuse(tmp_path / "absent.zip", "there is no file or folder")
    refuse(tmp_path / "cifar10-16.zip", "tcm data fetch cifar10 && tcm data prepare cifar10", "--size 16")
    with pytest.raises(TcmError, match="for the Hugging Face hub write hf://owner/name"):
        open_dataset("owner/name")
    (tmp_path / "blank").write_bytes(b"")
    refuse(tmp_path / "blank", "unknown format")
    with pytest.raises(TcmError, match="tcm data fetch mnist"):
        open_dataset("mnist")


@pytest.fixture(autouse=True)
def no_fetched_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "fetched"))


def test_names_with_control_characters(tmp_path: Path) -> None:
    refuse(writers.write_zip(tmp_path / "d.zip", {"a\nb.png": FILES["00000.png"]}), "'a\\nb.png'")


@pytest.mark.parametrize("name", ["../a.png", "x/../../a.png", "/etc/a.png", "..\\a.png", "C:\\a.png"])
def test_zip_names_that_lead_outside(tmp_path: Path, name: str) -> None:
    refuse(writers.write_zip(tmp_path / "d.zip", {name: FILES["00000.png"]}), "points outside the zip")


def test_zip_bombs(tmp_path: Path) -> None:
    bomb = writers.write_zip(tmp_path / "a.zip", {"a.png": bytes(100_000_000)})
    refuse(bomb, "a.png claims to unpack from", "bomb")
    lying = bytearray(writers.write_zip(tmp_path / "b.zip", {"a.png": b"x"}).read_bytes())
    entry = lying.rindex(b"PK\x01\x02")
    lying[entry + 24 : entry + 28] = struct.pack("<I", 2**32 - 2)
    (tmp_path / "b.zip").write_bytes(lying)
    refuse(tmp_path / "b.zip", "a.png claims to unpack from 3 to 4,294,967,294 bytes")
    lying[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)
    (tmp_path / "b.zip").write_bytes(lying)
    refuse(tmp_path / "b.zip", "a.png claims 2,147,483,648 bytes, more than the file has")


def test_zip_with_a_damaged_member(tmp_path: Path) -> None:
    path = writers.write_zip(tmp_path / "d.zip", FILES, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[data.index(FILES["00002.png"]) + 60] ^= 255
    path.write_bytes(data)
    refuse(path, "00002.png is damaged", "--skip-broken")
    path.write_bytes(data[: len(data) // 2])
    refuse(path, "d.zip")


def test_the_same_name_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr("a.png", FILES["00000.png"])
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.png", FILES["00001.png"])
    refuse(tmp_path / "d.zip", "two files of the same name")


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 3, 8, 8), np.float32), "float32"),
        (np.zeros((2, 3, 8, 3), np.uint8), "both ways"),
        (np.zeros((2, 8, 8, 4), np.uint8), "no axis of 1 or 3 channels"),
        (np.zeros((0, 3, 8, 8), np.uint8), "shape"),
        (np.zeros((8, 8), np.uint8), "images are [n, H, W]"),
        (np.zeros((2, 3, 8, 8), np.int16), "int16"),
        (np.array([{"a": 1}], dtype=object), "object"),
    ],
)
def test_bad_arrays(tmp_path: Path, array: np.ndarray, problem: str) -> None:
    (tmp_path / "d.npy").write_bytes(npy(array))
    refuse(tmp_path / "d.npy", problem)
    refuse(writers.write_zip(tmp_path / "d.npz", {"images.npy": npy(array)}), problem)


def test_bad_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pictures=IMAGES)
    refuse(tmp_path / "a.npz", "holds the arrays ['pictures']", "images")
    np.savez(tmp_path / "b.npz", images=IMAGES, labels=np.zeros(5, int))
    refuse(tmp_path / "b.npz", "5 labels for 6 images")
    np.savez(tmp_path / "c.npz", images=IMAGES)
    refuse(tmp_path / "c.npz", "split 'test'", split="test")
    header = npy(IMAGES).replace(b"(6, 3, 8, 8)", b"(6, 3, 9, 9)")
    refuse(writers.write_zip(tmp_path / "d.npz", {"images.npy": header}), "declares 1,458 bytes but holds 1,152")


def test_headers_that_declare_terabytes_cost_no_memory(tmp_path: Path) -> None:
    """In a process that may use little memory, each lie is refused as what it is."""
    shape = b"(9999999, 3, 99, 99)"
    header = npy(np.zeros((1, 1, 1, 1), np.uint8)).replace(b"(1, 1, 1, 1)" + b" " * (len(shape) - 12), shape)
    (tmp_path / "d.npy").write_bytes(header)
    writers.write_zip(tmp_path / "d.npz", {"images.npy": header})
    idx = struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**31, 2**31) + bytes(99)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx))
    script = """
import resource, sys
from tcm.data import open_dataset
from tcm.foundation.errors import TcmError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)
for path in sys.argv[1:]:
    try:
        open_dataset(path)
    except TcmError as error:
        print("refused", error)
"""
    paths = [str(path) for path in sorted(tmp_path.iterdir()) if path.is_file()]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.count("refused") == len(paths) == 4, done.stdout


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (struct.pack(">HBB3I", 0, 8, 3, 2, 2, 2) + bytes(7), "declares 8 values but holds 7"),
        (struct.pack(">HBB3I", 0, 8, 3, 2, 2, 2) + bytes(9), "declares 8 values but holds more"),
        (struct.pack(">HBB3I", 0, 13, 3, 2, 2, 2) + bytes(32), "unknown format"),
        (struct.pack(">HBBI", 0, 8, 1, 2) + bytes(2), "images are [n, H, W]"),
        (struct.pack(">HBB", 0, 8, 3), "damaged"),
        (gzip.compress(writers.idx_bytes(IMAGES[:, 0]))[:-12], "damaged"),
    ],
    ids=["short", "long", "floats", "one dimension", "cut header", "cut gzip"],
)
def test_bad_idx(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    refuse(tmp_path / "train-images-idx3-ubyte", "train-images-idx3-ubyte", problem)


def test_bad_cifar(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3072))
    refuse(tmp_path, "data_batch_1.bin", "multiple of 3073")
    (tmp_path / "data_batch_1.bin").write_bytes(b"\x0b" + bytes(3072))
    refuse(tmp_path, "label 11 has no name")


def test_bad_shards(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, writers.sample_labels(6))
    whole = (folder / "part-0000.tar").read_bytes()
    (folder / "part-0000.tar").write_bytes(whole[:700])
    refuse(folder, "part-0000.tar")
    claims = tarfile.TarInfo("long")
    claims.type, claims.size = tarfile.GNUTYPE_LONGNAME, 2**36
    (folder / "part-0000.tar").write_bytes(claims.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    refuse(folder, "part-0000.tar")
    (folder / "part-0000.tar").write_bytes(b"x" * 2000)
    refuse(folder, "part-0000.tar is not a valid, uncompressed tar")
    with tarfile.open(folder / "part-0000.tar", "w") as shard:
        for name, data in (("0.png", FILES["00000.png"]), ("0.cls", b"one")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            shard.addfile(entry, io.BytesIO(data))
    refuse(folder, "0.cls holds b'one'")


def test_indices_outside(tmp_path: Path) -> None:
    dataset = open_dataset("digits")
    for index in (-1, 1797):
        with pytest.raises(TcmError, match="use 0 to 1796"):
            dataset.read(np.array([0, index]))
    with pytest.raises(TcmError, match="channels=2"):
        open_dataset("digits", channels=2)


def test_missing_packages_are_named(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["datasets"] = sys.modules["webdataset"] = None
from tcm.data import open_dataset, open_stream
for opening in (open_dataset, open_stream):
    for path in sys.argv[1:]:
        try:
            opening(path)
        except ValueError as error:
            print(error)
"""
    writers.write_hugging_face(tmp_path / "h", IMAGES, writers.sample_labels(6))
    writers.write_shards(tmp_path / "s", IMAGES, None)
    paths = [str(tmp_path / "h"), str(tmp_path / "s")]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    # Shards on this machine need nothing beyond the core.
    assert done.stdout.count("pip install -e '.[data]'") == 2, done.stdout
