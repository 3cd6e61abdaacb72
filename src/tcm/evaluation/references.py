"""What samples are compared with: a data set's statistics, kept by content and never by name."""

from __future__ import annotations

import hashlib
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from tcm.data import Dataset, Stream
from tcm.data.dataset import Indices
from tcm.evaluation.features import Detector
from tcm.evaluation.sharing import ALONE, gather_rows, merge_statistics, shared_hash
from tcm.evaluation.statistics import accumulate, running_statistics
from tcm.foundation.counting import Counter, uncounted
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import data_folder
from tcm.foundation.files import atomic_write
from tcm.foundation.locks import locked
from tcm.foundation.processes import Processes
from tcm.method.gaussians import Statistics

FORMAT = "1"
KEEP_SECONDS = 30.0
"""How often unfinished statistics are kept, so that a killed computation resumes."""
CHUNK = 2048
"""Images whose features are kept together for the same reason."""
PAPERS_COUNT = 50_000
"""How many images papers measure, and look at one by one."""


@dataclass(frozen=True)
class Reference:
    """What a detector saw in the images that samples are compared with: the statistics of all of them.

    Where a metric looks at single images, also the features of at most 50,000 of them.
    """

    detector: Detector
    name: str
    hash: str
    statistics: Statistics
    features: Tensor | None = None


@dataclass(frozen=True)
class Observed:
    """What a detector saw in a stream of images."""

    statistics: Statistics
    count: int
    features: Tensor | None


def observe(images: Iterable[Tensor], detector: Detector, keep: bool = False, processes: Processes = ALONE) -> Observed:
    """One pass over this process's uint8 batches; statistics over all processes. `keep` also collects the features.

    >>> from tcm.evaluation.features import load_detector
    >>> observe([torch.zeros(4, 1, 8, 8, dtype=torch.uint8)], load_detector("digits")).statistics.count
    4
    """
    kept: list[Tensor] = []

    def features() -> Iterator[Tensor]:
        shape: torch.Size | None = None
        for batch in images:
            if shape is not None and batch.shape[1:] != shape:
                raise TcmError(
                    f"images of shapes {tuple(shape)} and {tuple(batch.shape[1:])} are mixed; bring them to one size "
                    "with `tcm data prepare`"
                )
            shape = batch.shape[1:]
            found = detector.features(batch)
            if keep:
                kept.append(found)
            yield found

    merged = merge_statistics(processes, accumulate(features()), detector.dimension)
    if merged is None or merged.count is None:
        raise TcmError("there are no images to measure")
    if not keep:
        return Observed(merged, merged.count, None)
    own = torch.cat(kept) if kept else torch.empty(0, detector.dimension)
    return Observed(merged, merged.count, gather_rows(processes, own, merged.count))


def dataset_batches(
    dataset: Dataset, batch: int, processes: Processes = ALONE, indices: Indices | None = None
) -> Iterator[Tensor]:
    """This process's images of a data set (or of those at `indices`), as uint8 batches."""
    own = (np.arange(dataset.count) if indices is None else indices)[processes.rank :: processes.count]
    for start in range(0, len(own), batch):
        images, _ = dataset.read(own[start : start + batch])
        yield torch.from_numpy(images)


def _count_to_take(count: int | None, available: int) -> int:
    """`count` images, but no more than there are."""
    if count is not None and count < 2:
        raise TcmError(f"reference_count={count} is too low; use at least 2")
    return available if count is None else min(count, available)


def chosen_images(available: int, count: int | None = None) -> Indices:
    """The indices of `count` images (50,000 unless given) out of those available, or of all; always the same choice.

    >>> len(chosen_images(60_000)), len(chosen_images(1797)), len(chosen_images(1797, 200))
    (50000, 1797, 200)
    """
    order = np.random.default_rng(0).permutation(available)
    return np.sort(order[: PAPERS_COUNT if count is None else count])


def stream_batches(
    stream: Stream, batch: int, processes: Processes = ALONE, indices: Indices | None = None
) -> Iterator[Tensor]:
    """This process's images of a stream (or of those at `indices`), once through, as uint8 batches.

    Each process reads all and decodes its own.
    """
    samples = (sample for shard in range(stream.shards) for sample in stream.shard(shard))
    if indices is not None:
        wanted = set(indices.tolist())
        first = islice(samples, int(indices.max()) + 1)  # what comes after the last of them is not read
        samples = (sample for index, sample in enumerate(first) if index in wanted)
    own = islice(samples, processes.rank, None, processes.count)
    while some := list(islice(own, batch)):
        yield torch.from_numpy(np.stack([stream.decode(sample) for sample in some]))


def stream_reference(
    stream: Stream,
    name: str,
    detector: Detector,
    keep: bool = False,
    batch: int = 64,
    processes: Processes = ALONE,
    count: int | None = None,
    counter: Counter = uncounted,
) -> Reference:
    """The reference for a stream, or for its first `count` images; not kept: what identifies it is not its content.

    Its number of images is known only at its end, so their features, if asked for, take a second pass.
    """
    first = None if count is None else np.arange(_count_to_take(count, count))
    own = None if count is None else -(-count // processes.count)
    passing = counter(stream_batches(stream, batch, processes, first), own, f"reference {name}")
    observed = observe(passing, detector, processes=processes)
    features = None
    if keep:
        chosen = chosen_images(observed.count)
        passing = counter(stream_batches(stream, batch, processes, chosen), len(chosen), f"features of {name}")
        features = observe(passing, detector, True, processes).features
    identity = hashlib.sha256(stream.identity.encode()).hexdigest()
    return Reference(detector, name, identity, observed.statistics, features)


def reference_of(
    dataset: Dataset,
    name: str,
    detector: Detector,
    keep: bool = False,
    batch: int = 64,
    processes: Processes = ALONE,
    count: int | None = None,
    counter: Counter = uncounted,
) -> Reference:
    """The reference for a data set: from the cache if this detector has seen the same pixels before, else computed.

    `keep` asks for features too, which precision, recall and KID need: those of 50,000 images, or of all if fewer.
    `count` takes only so many of its images, always the same; scores record how many.
    """
    if dataset.latents is not None:
        raise TcmError(f"{name} has {dataset.latents}, not images to compare with; give the images themselves")
    content = shared_hash(processes, dataset)
    taken = chosen_images(dataset.count, _count_to_take(count, dataset.count))
    limited = [f"{len(taken)} images"] if len(taken) < dataset.count else []
    identity = [FORMAT, content, detector.hash, detector.preprocessing, *limited]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    chosen = taken[chosen_images(len(taken))]
    folder = data_folder() / "references"
    statistics_file, features_file = folder / f"{key}.safetensors", folder / f"{key}-{len(chosen)}-features.safetensors"
    look = _Look(dataset, name, detector, batch, processes, counter)
    missing = not statistics_file.exists() or (keep and not features_file.exists())
    alone = locked(data_folder() / "locks" / key, f"looks at {name}")
    with alone if missing and processes.count == 1 else nullcontext():
        features = _read(features_file, processes) if keep else {}
        moments = _read(statistics_file, processes)
        if features is None:
            parts = folder / f"{key}-partial"
            features = {"features": look.features(chosen, parts)}
            _write(features_file, features, processes)
            shutil.rmtree(parts, ignore_errors=True)
        if moments is None:
            unfinished = folder / f"{key}-partial.safetensors"
            seen = features.get("features") if len(chosen) == len(taken) else None
            moments = _moments(look.statistics(taken, unfinished) if seen is None else Statistics.of(seen))
            _write(statistics_file, moments, processes)
            unfinished.unlink(missing_ok=True)
    return Reference(detector, name, content, _statistics(moments), features.get("features"))


@dataclass(frozen=True)
class _Look:
    """A detector that looks at images of a data set; a single process keeps what it has so far, and resumes from it."""

    dataset: Dataset
    name: str
    detector: Detector
    batch: int
    processes: Processes
    counter: Counter

    def statistics(self, taken: Indices, unfinished: Path) -> Statistics:
        """The statistics of these images; a file keeps them every half minute and when interrupted."""
        if self.processes.count > 1:
            return observe(self._passing(taken, "reference"), self.detector, processes=self.processes).statistics
        found = _read(unfinished, ALONE)
        before = None if found is None else _statistics(found)
        rest = taken[0 if before is None or before.count is None else before.count :]
        kept, total = time.monotonic(), before
        try:
            for total in running_statistics(map(self.detector.features, self._passing(rest, "reference")), before):
                if time.monotonic() - kept > KEEP_SECONDS:
                    _write(unfinished, _moments(total), ALONE)
                    kept = time.monotonic()
        except KeyboardInterrupt:
            if total is not None:
                _write(unfinished, _moments(total), ALONE)
            raise
        if total is None:
            raise TcmError("there are no images to measure")
        return total

    def features(self, chosen: Indices, parts: Path) -> Tensor:
        """The features of these images; a folder keeps them chunk by chunk."""
        if self.processes.count > 1:
            found = observe(self._passing(chosen, "features of"), self.detector, True, self.processes).features
            assert found is not None, "asked for"
            return found
        files = [parts / f"{start:08d}.safetensors" for start in range(0, len(chosen), CHUNK)]
        done = next((index for index, file in enumerate(files) if not file.exists()), len(files))
        rest = chosen[done * CHUNK :]
        rows = [torch.empty(0, self.detector.dimension)]
        for images in self._passing(rest, "features of"):
            rows.append(self.detector.features(images))
            while sum(map(len, rows)) >= min(CHUNK, len(chosen) - done * CHUNK) > 0:
                together = torch.cat(rows)
                _write(files[done], {"features": together[:CHUNK].clone()}, ALONE)
                rows, done = [together[CHUNK:]], done + 1
        return torch.cat([load_file(file)["features"] for file in files])

    def _passing(self, chosen: Indices, what: str) -> Iterator[Tensor]:
        own = -(-len(chosen) // self.processes.count)
        batches = dataset_batches(self.dataset, self.batch, self.processes, chosen)
        return self.counter(batches, own, f"{what} {self.name}")


def _moments(statistics: Statistics) -> dict[str, Tensor]:
    count = torch.tensor(statistics.count)
    return {"mean": statistics.mean, "covariance": statistics.covariance, "count": count}


def _statistics(moments: dict[str, Tensor]) -> Statistics:
    return Statistics(moments["mean"], moments["covariance"], int(moments["count"]))


def _read(path: Path, processes: Processes) -> dict[str, Tensor] | None:
    """A file of the cache, if every process has it: machines may have different caches."""
    try:
        found = load_file(path) if path.exists() else None
    except SafetensorError as error:
        raise TcmError(f"{path} is damaged ({error}); delete it") from error
    found_by = processes.sum(torch.tensor(float(found is not None), device=processes.device))
    return found if int(found_by) == processes.count else None


def _write(path: Path, tensors: dict[str, Tensor], processes: Processes) -> None:
    if processes.first:
        with atomic_write(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def published_reference(path: Path, detector: Detector) -> Reference:
    """Published statistics in EDM's form: an .npz with `mu` [d] and `sigma` [d, d]; how many images is not in it."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            mean, covariance = (torch.from_numpy(archive[key].astype(np.float64)) for key in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TcmError(f"{path} is not an .npz with mu and sigma ({error}); give EDM's reference statistics") from error
    if mean.shape != (detector.dimension,) or covariance.shape != (detector.dimension, detector.dimension):
        raise TcmError(
            f"{path} holds mu {tuple(mean.shape)} and sigma {tuple(covariance.shape)}; the detector {detector.name!r} "
            f"has {detector.dimension} features"
        )
    if not bool(torch.isfinite(mean).all()) or not torch.allclose(covariance, covariance.T, rtol=1e-3, atol=1e-6):
        raise TcmError(f"{path} holds NaN, or a sigma that is not symmetric; copy or download it again")
    digest = hashlib.sha256(mean.numpy().tobytes() + covariance.numpy().tobytes()).hexdigest()
    return Reference(detector, path.name, digest, Statistics(mean, covariance, None))


def is_published(path: Path) -> bool:
    """Whether a file is an .npz of statistics rather than of images."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return {"mu.npy", "sigma.npy"} <= set(archive.namelist())
    except zipfile.BadZipFile:
        return False
