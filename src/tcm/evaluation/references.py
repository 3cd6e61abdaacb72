"""What samples are compared with: a data set's statistics, kept by content and never by name."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Iterator
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
from tcm.data.opening import data_folder
from tcm.evaluation.features import Detector
from tcm.evaluation.sharing import ALONE, gather_rows, merge_statistics, shared_hash
from tcm.evaluation.statistics import Statistics, accumulate
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write
from tcm.foundation.processes import Processes

FORMAT = "1"
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
        samples = (sample for index, sample in enumerate(samples) if index in wanted)
    own = islice(samples, processes.rank, None, processes.count)
    while some := list(islice(own, batch)):
        yield torch.from_numpy(np.stack([stream.decode(sample) for sample in some]))


def stream_reference(
    stream: Stream, name: str, detector: Detector, keep: bool = False, batch: int = 64, processes: Processes = ALONE
) -> Reference:
    """The reference for a stream; not kept, as what identifies a stream is not its content.

    Its number of images is known only at its end, so their features, if asked for, take a second pass.
    """
    observed = observe(stream_batches(stream, batch, processes), detector, processes=processes)
    features = None
    if keep:
        chosen = chosen_images(observed.count)
        features = observe(stream_batches(stream, batch, processes, chosen), detector, True, processes).features
    identity = hashlib.sha256(stream.identity.encode()).hexdigest()
    return Reference(detector, name, identity, observed.statistics, features)


def reference_of(
    dataset: Dataset,
    name: str,
    detector: Detector,
    keep: bool = False,
    batch: int = 64,
    processes: Processes = ALONE,
) -> Reference:
    """The reference for a data set: from the cache if this detector has seen the same pixels before, else computed.

    `keep` asks for features too, which precision, recall and KID need: those of 50,000 images, or of all if fewer.
    """
    content = shared_hash(processes, dataset)
    key = hashlib.sha256("\n".join([FORMAT, content, detector.hash, detector.preprocessing]).encode()).hexdigest()
    chosen = chosen_images(dataset.count)
    folder = data_folder() / "references"
    statistics_file, features_file = folder / f"{key}.safetensors", folder / f"{key}-{len(chosen)}-features.safetensors"
    moments = _read(statistics_file, processes)
    features = _read(features_file, processes) if keep else {}
    if moments is None:
        # Where all images are chosen, one pass sees both.
        both = features is None and len(chosen) == dataset.count
        observed = observe(dataset_batches(dataset, batch, processes), detector, both, processes)
        moments = {"mean": observed.statistics.mean, "covariance": observed.statistics.covariance}
        moments["count"] = torch.tensor(observed.count)
        _write(statistics_file, moments, processes)
        if observed.features is not None:
            features = {"features": observed.features}
            _write(features_file, features, processes)
    if features is None:
        observed = observe(dataset_batches(dataset, batch, processes, chosen), detector, True, processes)
        assert observed.features is not None, "asked for"
        features = {"features": observed.features}
        _write(features_file, features, processes)
    statistics = Statistics(moments["mean"], moments["covariance"], int(moments["count"]))
    return Reference(detector, name, content, statistics, features.get("features"))


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
