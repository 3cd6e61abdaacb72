"""A study of seconds, in processes of its own, with a measurement that takes no time."""

import multiprocessing
import os
import time
from pathlib import Path

import torch
from launching import STAGES, tiny
from rich.console import Console

from tcm.evaluation.features import weights_hash
from tcm.foundation.errors import TcmError
from tcm.foundation.progress import SentProgress
from tcm.foundation.signals import StopRequest
from tcm.foundation.workers import Send
from tcm.recipes.folders import stage_folders
from tcm.recipes.tables import toml_value
from tcm.studies.folders import MEASURED_FILE
from tcm.studies.resolve import resolve_study
from tcm.studies.running import Outcome, Part, run_study
from tcm.studies.schema import Study, Variant
from tcm.weights import Model

_CONTEXT = multiprocessing.get_context("forkserver")  # with what `launching` lets it import

STUDY = """
title = "A tiny study"
question = "Does it run?"
claim = "It does."
where = "nowhere"
base = "digits"
"""


def overrides(steps: int = 4) -> list[str]:
    """Stages of a few steps that keep their last checkpoint, without sample grids, which cost more than the steps."""
    return [*tiny(steps, *(f"{stage}.sample_every=0" for stage in STAGES)), "*.keep=1"]


def write_study(path: Path, variants: dict[str, object], seeds: tuple[int, ...] = (0,), steps: int = 4) -> Path:
    """A study's file with these variants."""
    keys = {"overrides": overrides(steps), "seeds": list(seeds)}
    lines = [f"{key} = {toml_value(value)}" for key, value in keys.items()]
    table = [f"{toml_value(name)} = {toml_value(value)}" for name, value in variants.items()]
    path.write_text("\n".join([STUDY, *lines, "[variants]", *table]) + "\n")
    return path


def measure(study: Study, variant: Variant, run: Path, send: Send, stop: StopRequest, device: str) -> bool:
    """Write the hash of the measured model; one variant fails."""
    if variant.name == "cannot be measured":
        raise TcmError("detector=none; name one")
    folder = stage_folders(variant.recipe, run)[variant.stage]
    SentProgress(send, "measuring", 1).begin(0)
    (run / MEASURED_FILE).write_text(weights_hash(Model.load(folder / "model").denoiser.state_dict()))
    return True


def carry_out(path: Path, out: Path, workers: int = 1, part: Part | None = None) -> tuple[Outcome, str]:
    """The study to its end, and what it printed."""
    with out.with_suffix(".log").open("a") as log:
        outcome = run_study(resolve_study(path), out, measure, Console(file=log, width=200), workers, part)
    return outcome, out.with_suffix(".log").read_text()


class Started:
    """A study that runs in a process of its own."""

    def __init__(self, path: Path, out: Path, workers: int = 1, part: Part | None = None) -> None:
        self._process = _CONTEXT.Process(target=_child, args=(path, out, workers, part))
        self._process.start()

    def until(self, path: Path, pattern: str) -> None:
        """Wait until a file is there."""
        deadline = time.monotonic() + 120
        while not any(path.glob(pattern)):
            assert self._process.is_alive(), f"it ended before there was {pattern}"
            assert time.monotonic() < deadline, f"{pattern} never came"
            time.sleep(0.001)

    def send(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int | None:
        self._process.join(240)
        return self._process.exitcode


def _child(path: Path, out: Path, workers: int, part: Part | None) -> None:
    # One thread, as where several workers share the machine, here and in what this process starts: the same bits.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        outcome = run_study(resolve_study(path), out, measure, Console(file=nowhere), workers, part)
    os._exit(0 if outcome.finished and not outcome.failures else 1)
