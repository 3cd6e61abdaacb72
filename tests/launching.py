"""`tcm` in processes of its own, to be killed and signalled; a fork server spares each the seconds of its imports."""

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tcm.cli import main
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import Recipe

STAGES = ("diffusion", "consistency", "truncated")
FOLDERS = ("0-diffusion", "1-consistency", "2-truncated")
TIMINGS = ("images_per_second", "memory")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tcm.cli.dry_run", "tcm.training.run", "tcm.report.page", "torch._dynamo"])


def tiny(steps: int = 12, *overrides: str) -> list[str]:
    """Overrides that make `digits` a matter of seconds, with a checkpoint every 4 steps, and dropout."""
    network = ["network.channels=8", "network.blocks=1", "network.dropout=0.2", "t_max=10.0", "sigma_data=0.75"]
    words = [f"steps={steps}", "batch=16", "log_every=2", "checkpoint_every=4"]
    stages = [f"{stage}.{word}" for stage in STAGES for word in words]
    # A grid of the diffusion model's samples costs more than all its steps: there is one, at the end.
    samples = ["diffusion.sample_every=12", "consistency.sample_every=6", "truncated.sample_every=6"]
    watched = ["consistency.watched_images=16"]
    ours = [*network, "adapts=false", *stages, *samples, *watched, "diffusion.warmup=1", "consistency.curriculum.d=4"]
    replaced = tuple(f"{override.partition('=')[0]}." for override in overrides)  # a table replaces all its keys
    return [word for word in ours if not f"{word.partition('=')[0]}.".startswith(replaced)] + list(overrides)


def tiny_recipe(steps: int = 12, *overrides: str) -> Recipe:
    """The recipe of those overrides."""
    return resolve("digits", tiny(steps, *overrides))


class Command:
    """A `tcm` command that runs; its output goes to a file."""

    def __init__(self, arguments: Sequence[str], output: Path, environment: dict[str, str], folder: Path) -> None:
        self._output = output
        self._process = _CONTEXT.Process(target=_child, args=(list(arguments), str(output), environment, str(folder)))
        self._process.start()

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, signal: int, *, to_its_processes: bool = False) -> None:
        """Send it a signal, if it still runs; as a terminal does, also to the processes that it started."""
        pid = self._process.pid
        assert pid is not None
        with suppress(ProcessLookupError, FileNotFoundError):
            started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if to_its_processes else []
            for one in (*started, pid):
                os.kill(int(one), signal)

    def until(self, condition: Callable[[], bool], patience: float = 120) -> None:
        """Wait for a condition, or for the command's end."""
        deadline = time.monotonic() + patience
        while self.running and not condition():
            assert time.monotonic() < deadline, f"waited in vain; it said:\n{self.text}"
            time.sleep(0.0005)

    def wait(self, patience: float = 240) -> int:
        """Its exit code; negative if a signal ended it."""
        self._process.join(patience)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"the command does not end; it said:\n{self.text}")
        return code


def _child(arguments: list[str], output: str, environment: dict[str, str], folder: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["tcm", *arguments]
    main()


class Launcher:
    """Starts commands, each with an output file in `folder`; they work `inside` another, the tests' own by default."""

    def __init__(self, folder: Path, inside: Path | None = None) -> None:
        self._folder = folder
        self._inside = inside
        self._count = 0

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> Command:
        """Start `tcm ARGUMENTS`."""
        self._count += 1
        output = self._folder / f"output-{self._count}.txt"
        return Command(arguments, output, environment or {}, self._inside or Path.cwd())

    def run(self, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        """`tcm ARGUMENTS` to its end: exit code and output."""
        command = self.start(*arguments, environment=environment)
        return command.wait(), command.text

    def start_ranks(self, count: int, *arguments: str, environment: dict[str, str] | None = None) -> list[Command]:
        """Start `count` processes that share a run, as torchrun would."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = (environment or {}) | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return [self.start(*arguments, environment=rank) for rank in ranks]

    def run_ranks(
        self, count: int, *arguments: str, environment: dict[str, str] | None = None
    ) -> list[tuple[int, str]]:
        """Exit code and output of each of `count` processes."""
        commands = self.start_ranks(count, *arguments, environment=environment)
        return [(command.wait(), command.text) for command in commands]


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a stage's metrics.jsonl, without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in found]


def losses(folder: Path, key: str = "loss") -> list[float]:
    """A stage's course of the loss."""
    return [line[key] for line in lines(folder) if key in line]


def fingerprint(run: Path) -> dict[str, bytes]:
    """All bytes that a run's randomness and arithmetic decide: models, kept states, sample grids."""
    files = sorted([*run.glob("*/model/*"), *run.glob("*/samples/*.png")])
    found = {str(file.relative_to(run)): file.read_bytes() for file in files}
    # The order of the words in the states' headers is arbitrary, so their tensors are compared.
    for file in sorted(run.glob("*/state/step-*/*.safetensors")):
        tensors = load_file(file).items()
        found |= {f"{file.relative_to(run)} {name}": tensor.numpy().tobytes() for name, tensor in tensors}
    return found


def model_weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    """The weights that a stage ended with."""
    return load_file(run / stage / "model" / "model.safetensors")
