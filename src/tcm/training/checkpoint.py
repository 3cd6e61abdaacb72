"""Checkpoints that exist whole or not at all: written aside, synced, renamed, checksummed; the last K are kept.

The tensors go through torch.distributed.checkpoint into safetensors files, so that a run can resume with another number
of processes, and so that reading a checkpoint never unpickles anything.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from tcm.foundation.errors import TcmError, describe_validation
from tcm.foundation.files import is_full, publish, read_record
from tcm.foundation.processes import Processes
from tcm.training.guard import GuardState
from tcm.weights import Model, ModelCard

CHECKSUMS, POSITION, ASIDE = "checksums.json", "position.json", ".writing-"


class LearnerPosition(BaseModel):
    """Where one network's training stands, besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    guard: GuardState = GuardState()
    scaler: dict[str, int | float] = {}


class Position(LearnerPosition):
    """Where a stage stands, besides its tensors; `guard` and `scaler` are the student's."""

    step: int
    retry: int = 0
    others: dict[str, LearnerPosition] = {}
    """The other networks that are trained."""
    curves: dict[float, list[tuple[int, float]]] = {}
    """The distances that were measured so far: what `until_flat` goes by."""
    threads: int | None = None
    """Those that the next step is computed with: another number rounds differently. None in older checkpoints."""
    data: dict[str, JsonValue] | None = None
    """The position in the stream that the data comes from; indexed data sets need none."""


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, None if there is none, and what is wrong with those after it."""

    path: Path | None
    damage: tuple[str, ...]


class Checkpoints:
    """The checkpoints of a stage, in `folder`/step-N: the newest, and the last `keep` of every `every` steps.

    What a stop saved in between is not kept beyond the next, so that a stage that was interrupted ends with the same
    checkpoints as one that was not.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes, every: int = 1) -> None:
        self.folder, self.keep, self.processes, self.every = folder, keep, processes, every

    def save(self, tensors: dict[str, Tensor], position: Position) -> None:
        """Write a checkpoint; a full disk is an error that leaves the one before intact."""
        target = self.folder / f"step-{position.step}"
        aside = self.folder / f"{ASIDE}{position.step}"
        with self.processes.agreeing(), disk_errors(target):
            if self.processes.first:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with self.processes.agreeing(), disk_errors(target), _removed_on_error(aside):
            _write_tensors(tensors, aside)  # fails in all processes or in none
            # Each process its own file: one alone would need half a minute for the 18 GB of EDM2-XL.
            own = {file.name: _checksum(file) for file in aside.glob(f"shard-{self.processes.rank + 1:05d}-*")}
        sums = {name: checksum for part in self.processes.gather(own) for name, checksum in part.items()}
        with self.processes.agreeing(), disk_errors(target), _removed_on_error(aside):
            if self.processes.first:
                (aside / POSITION).write_text(position.model_dump_json(indent=2))
                sums |= {file.name: _checksum(file) for file in aside.iterdir() if file.name not in sums}
                (aside / CHECKSUMS).write_text(json.dumps(dict(sorted(sums.items())), indent=2))
                publish(aside, target)
                usual = [step for step in self._steps() if step == position.step or step % self.every == 0]
                for old in set(self._steps()) - set(usual[: self.keep]):
                    shutil.rmtree(self.folder / f"step-{old}")

    def newest(self) -> Newest:
        """The newest whole checkpoint; a damaged one is reported and set aside, and the one before it is used."""
        if self.processes.first:
            for half in self.folder.glob(f"{ASIDE}*"):
                shutil.rmtree(half)
        found: list[str] = []
        for step in self.processes.gather(self._steps())[0]:
            path = self.folder / f"step-{step}"
            own = _damage(path, self.processes.rank, self.processes.count)
            damage = next(filter(None, self.processes.gather(own)), None)
            if damage is None:
                return Newest(path, tuple(found))
            found.append(f"{path} is damaged ({damage}); it is skipped")
            if self.processes.first:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        return Newest(None, tuple(found))

    def load(self, path: Path, tensors: dict[str, Tensor]) -> Position:
        """Read a checkpoint into `tensors`, in place, and return its position."""
        _read_tensors(tensors, path)
        try:
            return Position.model_validate_json(read_record(path / POSITION))
        except ValidationError as error:
            raise describe_validation(error, str(path / POSITION)) from error

    def _steps(self) -> list[int]:
        return sorted(kept_checkpoints(self.folder), reverse=True)


def kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a stage's state/ by their step, the first first."""
    found = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    return dict(sorted((int(number), path) for number, path in found.items() if number.isdecimal()))


def newest_step(stage: Path) -> int:
    """The step of a stage's newest checkpoint, from which it would resume; 0 if there is none."""
    return max(kept_checkpoints(stage / "state"), default=0)


def averaged_model(checkpoint: Path, card: ModelCard) -> Model:
    """The model that a stage would have ended with at a checkpoint: the student's first average.

    >>> averaged_model(Path("runs/digits/1-consistency/state/step-300"), card)  # doctest: +SKIP
    """
    if (damage := _damage(checkpoint)) is not None:
        raise TcmError(f"{checkpoint} is damaged ({damage}); remove it, and it is left out")
    with torch.device("meta"):
        model = Model.fresh(card.alone)
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.denoiser.state_dict().items()}
    saved = {f"average.0.{name}": tensor.view(1) if tensor.ndim == 0 else tensor for name, tensor in weights.items()}
    _read_tensors(saved, checkpoint)
    model.denoiser.load_state_dict(weights, assign=True)
    return model


def _damage(path: Path, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with a process's share of a checkpoint's files, None if nothing is."""
    try:
        sums = json.loads(read_record(path / CHECKSUMS))
    except (OSError, ValueError, RecursionError):
        return f"{CHECKSUMS} is missing or unreadable"
    for name, expected in list(sums.items())[rank::world]:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != expected:
            return f"{name} does not match its checksum"
    return None


def _read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_saver.save(
            dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True)
        )


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException):
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """A full disk or quota as an error that the user can fix."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        if not _is_full(error):
            raise
        raise TcmError(
            f"the disk is full, and {target} could not be written; free some space and resume: what was saved before "
            f"is intact"
        ) from error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, CheckpointException):
        return any(_is_full(failure[0]) for failure in error.failures.values())
    return is_full(error)
