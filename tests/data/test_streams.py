"""Streams resume exactly from a saved position, and the processes share the same whole batches."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import serving
import torch
import writers

from tcm.data import LoadedBatch, Stream, StreamBatches, hashing, open_data, open_dataset, open_stream, streams
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Classes

COUNT = 101
IMAGES = writers.sample_pixels(COUNT, height=6, width=6)
LABELS = writers.sample_labels(COUNT)


def open_again(path: Path) -> Stream:
    return open_stream(path, class_names=writers.CLASSES)


@pytest.fixture(params=["shards", "rows"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "shards":
        return writers.write_shards(tmp_path / "d", IMAGES, LABELS, per_shard=17)
    return writers.write_hugging_face(tmp_path / "d", IMAGES, LABELS)


def numbers(batch: LoadedBatch) -> list[int]:
    """Recognise each image among those written."""
    return [int(np.flatnonzero(np.equal(IMAGES, image).all(axis=(1, 2, 3)))[0]) for image in batch.images.numpy()]


@pytest.mark.parametrize("lanes", [1, 3])
def test_each_epoch_holds_every_image_once(path: Path, lanes: int) -> None:
    stream = open_again(path)
    assert (stream.shape, stream.condition_kind.names) == ((3, 6, 6), writers.CLASSES)
    batches = StreamBatches(stream, seed=3, batch=1, lanes=lanes, window=20).starting_at(0)
    seen = defaultdict(list)
    for batch in islice(batches, 4 * COUNT):
        (number,) = numbers(batch)
        assert int(batch.condition.index) == LABELS[number]
        seen[batch.resume[f"lane {batch.step % lanes}"]["epoch"]].append(number)
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(COUNT))
    assert sorted(seen[0]) != seen[0] != seen[1]


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (4, 16), (6, 1000)])
def test_a_saved_position_resumes_exactly(path: Path, lanes: int, window: int) -> None:
    options = {"seed": 5, "batch": 10, "flip": True, "lanes": lanes, "window": window}
    through = list(islice(StreamBatches(open_again(path), **options).starting_at(0), 15))
    for stop in (0, 6, 13):
        saved = json.loads(json.dumps(through[stop].resume))
        again = list(islice(StreamBatches(open_again(path), **options).starting_at(stop + 1, saved), 14 - stop))
        for one, other in zip(again, through[stop + 1 :], strict=True):
            assert one.step == other.step
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.condition.index, other.condition.index)
            assert one.resume == other.resume


def test_processes_share_the_same_whole_batch(path: Path) -> None:
    """Whatever their number, also if it changes on resume."""
    options = {"seed": 5, "batch": 12, "flip": True, "lanes": 6, "window": 20}
    alone = list(islice(StreamBatches(open_again(path), **options).starting_at(0), 12))
    saved = None
    for start, stop, world in ((0, 5, 3), (5, 9, 2), (9, 12, 6)):
        ranks = [
            StreamBatches(open_again(path), **options, rank=rank, world=world, workers=2).starting_at(start, saved)
            for rank in range(world)
        ]
        for whole in alone[start:stop]:
            shares = [next(rank) for rank in ranks]
            for share in shares:
                assert torch.equal(share.images, whole.images[share.index])
                assert torch.equal(share.condition.index, whole.condition.index[share.index])
            saved = {key: value for share in shares for key, value in share.resume.items()}
            assert saved == whole.resume


def test_compressed_shards_and_braces(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, None, per_shard=34)
    pattern = str(folder / "part-{0000..0002}.tar")
    assert open_stream(pattern).shards == 3
    assert numbers(next(StreamBatches(open_stream(pattern), seed=0, batch=COUNT, window=1).starting_at(0)))
    for shard in folder.glob("*.tar"):
        (folder / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
        shard.unlink()
    batch = next(StreamBatches(open_stream(folder), seed=0, batch=COUNT, lanes=1).starting_at(0))
    assert sorted(numbers(batch)) == list(range(COUNT))
    assert batch.condition is None


def test_each_process_fetches_its_own_shards(tmp_path: Path) -> None:
    writers.write_shards(tmp_path / "d", IMAGES, LABELS, per_shard=9)
    with serving.folder(tmp_path / "d") as (address, fetched):
        stream = open_stream(f"{address}/part-{{0000..0011}}.tar", class_names=writers.CLASSES)
        own = []
        for rank in range(2):
            fetched.clear()
            batches = StreamBatches(stream, seed=1, batch=8, lanes=4, window=8, rank=rank, world=2).starting_at(0)
            assert len(numbers(next(batches))) == 4
            batches.close()
            own.append(set(fetched))
    assert all(own)
    assert own[0].isdisjoint(own[1])


def test_a_broken_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut within a file, between an image and its class, within a header: it continues with the next whole sample."""
    monkeypatch.setattr(streams, "RETRIES", (0.0, 0.0, 0.0))
    writers.write_shards(tmp_path / "d", IMAGES[:8], LABELS[:8])
    (shard,) = (tmp_path / "d").glob("*.tar")
    whole = list(open_stream(shard).shard(0))
    sample, between = (shard.read_bytes().index(name) for name in (b"000001.png", b"000001.cls"))
    with serving.folder(tmp_path / "d", {shard.name: [-1, sample + 600, between, sample + 100]}) as (address, _):
        stream = open_stream(f"{address}/{shard.name}")
        again = list(stream.shard(0))
        assert [(one.data, one.annotation) for one in again] == [(one.data, one.annotation) for one in whole]
    with serving.folder(tmp_path / "d", {shard.name: [-1, *[sample] * 4]}) as (address, fetched):
        stream = open_stream(f"{address}/{shard.name}")
        with pytest.raises(TcmError, match=r"part-0000\.tar cannot be read to its end \(\d+ bytes are missing\)"):
            list(stream.shard(0))
        assert len(fetched) == 5
        with pytest.raises(TcmError, match=r"absent\.tar cannot be read to its end \(HTTP Error 404"):
            open_stream(f"{address}/absent.tar")
        assert len(fetched) == 6, "what the server refuses is not asked for again"


def test_bad_streams(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, LABELS)
    with pytest.raises(TcmError, match="would run a command"):
        open_stream(f"pipe:touch {tmp_path / 'ran'}")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TcmError, match=r"class names"):
        list(islice(StreamBatches(open_stream(folder, class_names=("one", "two")), seed=0, batch=9).starting_at(0), 1))
    with pytest.raises(TcmError, match="has no splits"):
        open_stream(folder, split="test")
    with pytest.raises(TcmError, match="channels=2"):
        open_stream(folder, channels=2)
    cut = folder / "part-0003.tar"
    cut.write_bytes(cut.read_bytes()[:1500])
    stream = open_again(folder)
    with pytest.raises(TcmError, match=r"part-0003\.tar"):
        list(islice(StreamBatches(stream, seed=0, batch=COUNT).starting_at(0), 1))
    with pytest.raises(TcmError, match=r"absent\.tar"):
        open_stream(tmp_path / "absent.tar")


def test_an_error_waits_for_its_batch(tmp_path: Path) -> None:
    """The image that cannot be read is the last of two batches: reading ahead does not spoil the first one."""
    writers.write_shards(tmp_path / "d", IMAGES[:8], None)
    (shard,) = (tmp_path / "d").glob("*.tar")
    batches = StreamBatches(open_stream(tmp_path / "d"), seed=0, batch=4, window=1)
    assert [numbers(batch) for batch in islice(batches.starting_at(0), 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    content = shard.read_bytes()
    shard.write_bytes(content.replace(writers.png(IMAGES[7]), bytes(len(writers.png(IMAGES[7])))))
    broken = StreamBatches(open_stream(tmp_path / "d"), seed=0, batch=4, window=1).starting_at(0)
    assert numbers(next(broken)) == [0, 1, 2, 3]
    with pytest.raises(TcmError, match="cannot be read as an image"):
        next(broken)


def test_a_hash_that_is_kept_beside_the_data_is_no_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a stream's folder is also read by index, to measure against it."""
    monkeypatch.setattr(hashing, "SETTLED", 0)
    before = open_again(path).identity
    hashing.hash_of(open_dataset(path, memory_limit=0))
    assert list(path.rglob(hashing.KEPT))
    assert open_again(path).identity == before


def test_positions_that_do_not_fit(path: Path) -> None:
    batches = StreamBatches(open_again(path), seed=0, batch=4, lanes=3)
    saved = next(batches.starting_at(0)).resume
    with pytest.raises(TcmError, match="step=7: a stream cannot jump there"):
        batches.starting_at(7)
    with pytest.raises(TcmError, match=r"has changed since it was read: it was None and is .* names and sizes"):
        batches.starting_at(1, {"step": 3})
    with pytest.raises(TcmError, match="lanes=2, but the stream was read in 3"):
        StreamBatches(open_again(path), seed=0, batch=4, lanes=2).starting_at(1, saved)
    (path / "another.tar" if list(path.glob("*.tar")) else path / "another").write_bytes(b"\0" * 1024)
    with pytest.raises(TcmError, match="has changed since it was read"):
        StreamBatches(open_again(path), seed=0, batch=4, lanes=3).starting_at(1, saved)


@pytest.mark.parametrize(
    ("lanes", "world", "message"),
    [
        (8, 4, r"data\.lanes=8: a stream of 6 shards is then read in 6 lanes, which 4 processes .* data\.lanes=4$"),
        (2, 3, r"data\.lanes=2: .* which 3 processes cannot share evenly; use data\.lanes=3$"),
        (8, 12, r"has 6 shards for 12 processes; use at most 6, or pack the images into more shards$"),
        (0, 1, r"lanes=0 .* at least 1"),
    ],
)
def test_lanes_that_cannot_be_shared(tmp_path: Path, lanes: int, world: int, message: str) -> None:
    stream = open_again(writers.write_shards(tmp_path / "d", IMAGES, LABELS, per_shard=17))
    with pytest.raises(TcmError, match=message):
        StreamBatches(stream, seed=0, batch=12, lanes=lanes, world=world)


def test_a_stream_and_a_data_set_of_the_same_shards_agree(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, LABELS)
    dataset = open_data(folder)
    stream = open_data(f"stream:{folder}", expected=Classes(3))
    assert isinstance(stream, Stream)
    assert (stream.shape, stream.condition_kind.names) == (dataset.shape, dataset.condition_kind.names)
    batch = next(StreamBatches(stream, seed=0, batch=COUNT, lanes=1).starting_at(0))
    assert sorted(numbers(batch)) == list(range(dataset.count))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["a.png", "a.jpg", "a.cls"], r"a has 2 images, a\.png and a\.jpg"),
        (["a.png", "a.PNG"], r"two files a\.PNG"),
        (["a.png", "a.cls", "a.cls"], r"two files a\.cls"),
        (["a.png", "b.png", "a.cls", "b.cls"], "files of a are not next to each other"),
        (["a.cls", "b.cls", "a.png", "b.png"], "files of a are not next to each other"),
        (["a.v1.png", "a.v2.png"], r"a\.v1\.png is not the image of a"),
        (["a.png", "b\n.png"], "plain names"),
        (["a.png", "a.mask.png", "a.cls", "d/a.png", "d/a.CLS", "alone.cls"], None),
        (["a.png", "._a.png", "a.cls", "__MACOSX/a.png", ".b.png"], None),
    ],
)
def test_a_tar_means_the_same_by_index_and_as_a_stream(tmp_path: Path, names: list[str], refused: str | None) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as shard:
        for number, name in enumerate(names):
            data = writers.png(IMAGES[number]) if name.lower().endswith(("png", "jpg")) else b"0"
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            shard.addfile(entry, io.BytesIO(data))
    readers = (lambda: open_dataset(path), lambda: list(open_stream(path).shard(0)))
    if refused is not None:
        for read in readers:
            with pytest.raises(TcmError, match=refused):
                read()
        return
    dataset, samples = open_dataset(path), list(open_stream(path).shard(0))
    labels = [] if dataset.class_labels is None else dataset.class_labels.values.tolist()
    assert [sample.annotation for sample in samples] == labels
    assert dataset.count == len(samples) == sum(name in ("a.png", "d/a.png") for name in names)


def test_no_name_of_a_local_shard_runs_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """webdataset takes the name of a file in the working folder for an address."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:x;touch ran;.tar").write_bytes(b"")
    with pytest.raises(TcmError):
        open_stream(".")
    assert not (tmp_path / "ran").exists()


def test_a_stream_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match="is a stream, but this needs images by index"):
        open_dataset(f"stream:{tmp_path}")
    for name in ("https://example.org/shards/0.tar", "shards/{000..099}.tar"):
        with pytest.raises(TcmError, match=f"for a stream of shards write stream:{name}"):
            open_dataset(name)


HUB_SCRIPT = """
import sys
import tarfile
from tcm.data import StreamBatches, open_stream
for name in sys.argv[1:]:
    stream = open_stream(name)
    batch = next(StreamBatches(stream, seed=0, batch=30, lanes=1).starting_at(0))
    labels = sorted(batch.condition.index.tolist())
    print(stream.identity, stream.shards, stream.condition_kind.count, labels == sorted([0, 1, 2] * 10))
"""


def test_the_hub(tmp_path: Path) -> None:
    """The library talks to a server that answers as the hub does; a branch is followed to its commit."""
    files = {"README.md": b""}
    for number in range(2):
        part = slice(15 * number, 15 * (number + 1))
        folder = writers.write_hugging_face(tmp_path / str(number), IMAGES[part], LABELS[part], parquet=True)
        files[f"train-0000{number}-of-00002.parquet"] = (folder / "train.parquet").read_bytes()
    old, new = "a" * 40, "b" * 40
    with serving.hub("owner/name", files, {"main": new, "v1": old}) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        script = [sys.executable, "-c", HUB_SCRIPT, "hf://owner/name", "hf://owner/name@v1"]
        done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines() == [f"train of hf://owner/name@{commit} 2 3 True" for commit in (new, old)], (
        done.stderr
    )
