"""The whole batch of a step is the same whatever the processes, the workers and the restarts."""

import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import writers

from tcm.data import Batches, Dataset, open_dataset
from tcm.data.order import flips, global_batch
from tcm.foundation.errors import TcmError

IMAGES = writers.sample_pixels(23, height=8, width=6)
LABELS = writers.sample_labels()


@pytest.fixture(params=["array", "folder", "zip", "shards", "Hugging Face"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    match request.param:
        case "array":
            np.savez(tmp_path / "d.npz", images=IMAGES, labels=LABELS)
            return open_dataset(tmp_path / "d.npz")
        case "folder":
            path = writers.write_files(tmp_path / "d", writers.with_csv(IMAGES, LABELS))
        case "zip":
            path = writers.write_zip(tmp_path / "d.zip", writers.with_csv(IMAGES, LABELS))
        case "shards":
            path = writers.write_shards(tmp_path / "d", IMAGES, LABELS)
        case _:
            path = writers.write_hugging_face(tmp_path / "d", IMAGES, LABELS)
    return open_dataset(path, memory_limit=0)


def expected(step: int, batch: int, flip: bool) -> tuple[np.ndarray, np.ndarray]:
    indices = global_batch(23, 11, step, batch)
    images = IMAGES[indices]
    if flip:
        mirrored = flips(11, step, np.arange(batch))
        images = np.stack([image[..., ::-1] if turn else image for image, turn in zip(images, mirrored, strict=True)])
    return images, LABELS[indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 4])
def test_whole_batches_depend_on_seed_and_step_alone(dataset: Dataset, workers: int, world: int) -> None:
    start = 10_000_000
    ranks = [
        list(
            islice(
                Batches(dataset, seed=11, batch=12, flip=True, rank=rank, world=world, workers=workers).starting_at(
                    start
                ),
                3,
            )
        )
        for rank in range(world)
    ]
    for number, shares in enumerate(zip(*ranks, strict=True)):
        images, labels = expected(start + number, 12, flip=True)
        whole = torch.empty(12, 3, 8, 6, dtype=torch.uint8)
        classes = torch.empty(12, dtype=torch.int64)
        for share in shares:
            assert share.step == start + number
            assert share.images.dtype == torch.uint8
            assert share.images.is_contiguous()
            whole[share.index] = share.images
            classes[share.index] = share.condition.index
        np.testing.assert_array_equal(whole, images)
        np.testing.assert_array_equal(classes, labels)


def test_workers_may_be_started_afresh(dataset: Dataset) -> None:
    """Where processes are spawned and not forked, the data set is pickled into them, even after it was read."""
    dataset.read(np.arange(3))
    copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(copy.read(np.arange(23))[0], IMAGES)


def test_a_restart_goes_on_where_it_stopped() -> None:
    batches = Batches(open_dataset("digits"), seed=0, batch=100, flip=True)
    through = list(islice(batches.starting_at(0), 40))
    for step in (1, 17, 18, 39):
        again = next(Batches(open_dataset("digits"), seed=0, batch=100, flip=True).starting_at(step))
        assert torch.equal(again.images, through[step].images)
        assert torch.equal(again.condition.index, through[step].condition.index)


def test_without_labels_and_with_a_batch_above_the_count(tmp_path: Path) -> None:
    dataset = open_dataset(writers.write_files(tmp_path / "d", writers.numbered(IMAGES)))
    loaded = Batches(dataset, seed=11, batch=60).at(2)
    assert loaded.condition is None
    np.testing.assert_array_equal(loaded.images, expected(2, 60, flip=False)[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(tmp_path: Path, workers: int) -> None:
    path = writers.write_zip(tmp_path / "d.zip", writers.with_csv(IMAGES, LABELS))
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(
        islice(
            Batches(open_dataset(path, memory_limit=0), seed=1, batch=4, flip=True, workers=workers).starting_at(0), 5
        )
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_later_is_named_in_one_line(tmp_path: Path, workers: int) -> None:
    folder = writers.write_files(tmp_path / "d", writers.numbered(IMAGES))
    batches = Batches(open_dataset(folder, memory_limit=0), seed=0, batch=23, workers=workers)
    (folder / "00007.png").write_bytes(b"overwritten")
    with pytest.raises(TcmError, match=r"^00007\.png cannot be read .*[^\n]*$"):
        next(batches.starting_at(0))


def test_impossible_values() -> None:
    for options in ({"batch": 0}, {"batch": 8, "seed": -1}, {"batch": 9, "world": 2}, {"batch": 8, "workers": -1}):
        with pytest.raises(TcmError):
            Batches(open_dataset("digits"), **{"seed": 0, **options})
