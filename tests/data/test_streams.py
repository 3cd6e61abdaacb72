"""Streams go on exactly where a saved position says, in another process's place too, and with any number of processes."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import writers

from tcm.data import LoadedBatch, Stream, StreamBatches, open_dataset, open_stream
from tcm.errors import TcmError

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
    return [int(np.flatnonzero((IMAGES == image).all(axis=(1, 2, 3)))[0]) for image in batch.images.numpy()]


def test_each_epoch_holds_every_image_once(path: Path) -> None:
    stream = open_again(path)
    assert (stream.shape, stream.classes) == ((3, 6, 6), 3)
    batches = list(islice(StreamBatches(stream, seed=3, batch=COUNT, window=16).starting_at(0), 3))
    seen = [numbers(batch) for batch in batches]
    for batch, order in zip(batches, seen, strict=True):
        assert sorted(order) == list(range(COUNT))
        np.testing.assert_array_equal(batch.labels, LABELS[order])
    assert seen[0] != seen[1] != seen[2]
    assert seen[0] != sorted(seen[0])


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_a_saved_position_resumes_exactly(path: Path, window: int) -> None:
    options = {"seed": 5, "batch": 8, "flip": True, "window": window}
    through = list(islice(StreamBatches(open_again(path), **options).starting_at(0), 30))
    for stop in range(0, 29, 3):
        saved = json.loads(json.dumps(through[stop].resume))
        again = list(islice(StreamBatches(open_again(path), **options).starting_at(stop + 1, saved), 29 - stop))
        for one, other in zip(again, through[stop + 1 :], strict=False):
            assert one.step == other.step
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)
            assert one.resume == other.resume


def test_processes_share_the_same_whole_batch(path: Path) -> None:
    options = {"seed": 5, "batch": 12, "flip": True, "window": 20}
    alone = list(islice(StreamBatches(open_again(path), **options).starting_at(0), 12))
    ranks = [
        list(islice(StreamBatches(open_again(path), **options, rank=rank, world=3, workers=2).starting_at(0), 12))
        for rank in range(3)
    ]
    for whole, *shares in zip(alone, *ranks, strict=True):
        for share in shares:
            assert torch.equal(share.images, whole.images[share.positions])
            assert share.resume == whole.resume


def test_compressed_shards_and_braces(tmp_path: Path) -> None:
    import gzip

    folder = writers.write_shards(tmp_path / "d", IMAGES, None, per_shard=34)
    pattern = str(folder / "part-{0000..0002}.tar")
    assert numbers(next(StreamBatches(open_stream(pattern), seed=0, batch=COUNT, window=1).starting_at(0)))
    for shard in folder.glob("*.tar"):
        (folder / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
        shard.unlink()
    batch = next(StreamBatches(open_stream(folder), seed=0, batch=COUNT).starting_at(0))
    assert sorted(numbers(batch)) == list(range(COUNT))
    assert batch.labels is None


def test_bad_streams(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, LABELS)
    with pytest.raises(TcmError, match="pass class_names"):
        open_stream(folder)
    with pytest.raises(TcmError, match="would run a command"):
        open_stream(f"pipe:touch {tmp_path / 'ran'}")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TcmError, match="not a position"):
        next(
            StreamBatches(open_stream(folder, class_names=writers.CLASSES), seed=0, batch=4).starting_at(0, {"step": 3})
        )
    cut = folder / "part-0003.tar"
    cut.write_bytes(cut.read_bytes()[:1500])
    stream = open_stream(folder, class_names=writers.CLASSES)
    with pytest.raises(TcmError, match=r"part-0003\.tar"):
        list(islice(StreamBatches(stream, seed=0, batch=COUNT).starting_at(0), 1))
    with pytest.raises(TcmError, match=r"absent\.tar"):
        open_stream(tmp_path / "absent.tar")


def test_a_stream_and_a_data_set_of_the_same_shards_agree(tmp_path: Path) -> None:
    folder = writers.write_shards(tmp_path / "d", IMAGES, LABELS)
    dataset = open_dataset(folder)
    batch = next(StreamBatches(open_stream(folder, class_names=writers.CLASSES), seed=0, batch=COUNT).starting_at(0))
    assert sorted(numbers(batch)) == list(range(dataset.count))
