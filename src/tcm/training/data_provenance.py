"""What a run's models were trained on: the data's hash, noted in the run and in each model's card once it is known.

To hash a large data set takes minutes of decoding, which no step and no stage waits for.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tcm.data import Dataset, Stream
from tcm.data.hashing import BackgroundHash, files_of, hash_of
from tcm.foundation.errors import TcmError
from tcm.foundation.files import atomic_write, read_record, write_text
from tcm.foundation.signals import StopRequest
from tcm.recipes.changes import Change
from tcm.weights.card import CONFIG_FILE, ModelCard, read_card

DATA_FILE, FILES_FILE = "data.txt", "data-files.txt"
"""In a run's folder: the hash of its data, once it is known; that of its files' names, sizes and times at once."""
A_MOMENT = 0.5
"""Seconds in which small data is hashed, so that its models are written once, with all that belongs to them."""


@dataclass(frozen=True)
class Known:
    """An identity that needs no hashing."""

    value: str
    problem: str | None = None

    def wait(self, seconds: float) -> bool:
        """Return at once: the identity is already known."""
        return True


class Notes:
    """The models whose cards are to say what data they come from."""

    def __init__(self, hashing: BackgroundHash | Known | None, console: Console, run: Path) -> None:
        self._hashing, self._console, self._run = hashing, console, run
        self._models: list[Path] = []

    def on(self, card: ModelCard) -> ModelCard:
        """The card of a model to come, with the hash if it is known by now."""
        return _with_data(card, None if self._hashing is None else self._hashing.value)

    def add(self, models: Iterable[Path]) -> None:
        """Note the hash in those of these models that lack it: now if it is known, else when it is."""
        self._models.extend(model for model in models if model.is_dir())
        self.write()

    def finish(self, stop: StopRequest) -> None:
        """At the end of the run, wait until the hash is known or a signal asks to stop."""
        if self._hashing is None:
            return
        if not self._hashing.wait(0):
            self._console.print("all stages are done; computing the hash of the data", highlight=False)
        while not self._hashing.wait(0.1) and not stop:
            pass
        self.write()
        if self._hashing.problem and not stop:
            self._console.print(
                f"the models do not record the hash of their data: {self._hashing.problem}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def write(self) -> None:
        """Note the hash wherever it is missing, if it is known by now."""
        if self._hashing is None or not self._hashing.wait(0) or self._hashing.value is None:
            return
        path = self._run / DATA_FILE
        if not path.exists():
            with atomic_write(path) as file:
                file.write(self._hashing.value.encode())
        for model in self._models:
            _note(model, self._hashing.value)
        self._models.clear()


@contextmanager
def notes_of_data(
    data: Dataset | Stream, run: Path, models: Iterable[Path], write: bool, console: Console
) -> Iterator[Notes]:
    """While the block runs, hash the data if one of the models lacks it; only the process that may `write` does.

    The data are known to be those that the run was started with. A stream is not hashed: its identity is what can be
    known without reading it all.
    """
    if write:
        _note_files(data, run)
    if not write or all(is_noted(model) for model in models):
        yield Notes(None, console, run)
        return
    known = data.identity if isinstance(data, Stream) else _noted(run / DATA_FILE)
    if known is not None:
        notes = Notes(Known(known), console, run)
        notes.write()
        yield notes
        return
    assert isinstance(data, Dataset)
    with BackgroundHash(data) as hashing:
        hashing.wait(A_MOMENT)
        notes = Notes(hashing, console, run)
        notes.write()
        try:
            yield notes
        finally:
            notes.write()


def check_same_data(
    data: Dataset | Stream, path: str, run: Path, models: Iterable[Path], moved: Change | None, console: Console
) -> None:
    """Refuse data that are not what the run was trained on so far: others at a new path, or changed ones at the same.

    Only where the files look different, their content is compared.
    """
    files, noted_files = _files_of(data), _noted(run / FILES_FILE)
    if moved is None and files is not None and files == noted_files:
        return
    noted = _noted_data(run, models)
    if noted is None and moved is not None:
        raise TcmError(
            f"{run} has no record of its data, so the data at the new path cannot be checked ({moved.text}); "
            "move the data back, or use another --run"
        )
    if noted is None and (files is None or noted_files is None):
        return
    if noted is not None and files is not None and isinstance(data, Dataset):
        console.print(f"comparing the content of {path} with that of the run", highlight=False, markup=False)
    if noted is not None and noted == (data.identity if isinstance(data, Stream) else hash_of(data)):
        return
    if moved is not None:
        raise TcmError(
            f"{run} was started with other data ({moved.text}, whose content differs); use the same data or another "
            "--run"
        )
    raise TcmError(
        f"data.path={path} has changed since {run} was started; train on the new data with another --run, or put the "
        "old data back"
    )


def _noted_data(run: Path, models: Iterable[Path]) -> str | None:
    """The hash of the data that a run has been trained on so far, as the run or one of its models has noted it."""
    cards = (read_card(model / CONFIG_FILE) for model in models if model.is_dir())
    in_models = (card.provenance.data for card in cards if card.provenance.data is not None)
    return _noted(run / DATA_FILE) or next(in_models, None)


def _noted(file: Path) -> str | None:
    return read_record(file) if file.exists() else None


def _files_of(data: Dataset | Stream) -> str | None:
    return data.identity if isinstance(data, Stream) else files_of(data)


def _note_files(data: Dataset | Stream, run: Path) -> None:
    path, files = run / FILES_FILE, _files_of(data)
    if files is not None and _noted(path) != files:
        write_text(path, files)


def _note(model: Path, value: str) -> None:
    path = model / CONFIG_FILE
    card = read_card(path)
    if card.provenance.data is None:
        with atomic_write(path) as file:
            file.write((_with_data(card, value).model_dump_json(indent=2) + "\n").encode())


def _with_data(card: ModelCard, value: str | None) -> ModelCard:
    return card.model_copy(update={"provenance": card.provenance.model_copy(update={"data": value})})


def is_noted(model: Path) -> bool:
    """Whether a model exists, and its card says what data it comes from."""
    try:
        return read_card(model / CONFIG_FILE).provenance.data is not None
    except TcmError:  # not trained yet
        return False
