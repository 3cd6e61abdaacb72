"""Training on streams: killed and resumed bit for bit, shared by processes, taken back by the guard, and refusals."""

import json
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import writers
from inprocess import begin, train
from launching import FOLDERS, Launcher, fingerprint, lines, losses, tiny, tiny_recipe
from test_guard import Ill

import tcm
from tcm.data import BatchSource, LoadedBatch, StreamBatches, open_dataset, open_stream
from tcm.foundation.errors import TcmError

pytestmark = pytest.mark.long

COUNT, STEPS = 100, 12
STAGE = FOLDERS[0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in 8 shards; 12 steps of 16 go through them more than once."""
    images, labels = open_dataset("digits").read(np.arange(COUNT))
    return writers.write_shards(tmp_path_factory.mktemp("data") / "shards", images, labels.index.numpy(), per_shard=13)


def words(path: str | Path, *overrides: str, **data: object) -> list[str]:
    """One stage on a stream, with threads, small windows and mirroring."""
    ours = {"path": f"stream:{path}", "lanes": 4, "window": 40, "workers": 2, "flip": "true"} | data
    return tiny(STEPS, 'order=["diffusion"]', *(f"data.{key}={value}" for key, value in ours.items()), *overrides)


def arguments(path: str | Path, run: Path, *overrides: str, **data: object) -> list[str]:
    return ["train", "digits", *words(path, *overrides, **data), "--run", str(run)]


def reached(run: Path, step: int) -> bool:
    return (run / STAGE / "state" / f"step-{step}").exists()


def at_the_end(run: Path) -> dict[str, bytes]:
    """A run's fingerprint without the states before the last, of which a signal leaves one more."""
    found = fingerprint(run).items()
    return {name: content for name, content in found if "/state/" not in name or f"/step-{STEPS}/" in name}


@pytest.mark.parametrize("kind", ["shards", pytest.param("rows", marks=pytest.mark.slow)])
def test_killed_signalled_and_resumed(launcher: Launcher, shards: Path, tmp_path: Path, kind: str) -> None:
    """SIGKILL after step 4, SIGTERM after step 8: the end is that of a run that nothing disturbed."""
    path = shards / "part-{0000..0007}.tar"
    if kind == "rows":
        images, labels = open_dataset("digits").read(np.arange(COUNT))
        path = writers.write_hugging_face(tmp_path / "rows", images, labels.index.numpy() % 3)
    # A line per step: the step at which SIGTERM arrives would otherwise cut a line's mean in two.
    changes = ["classes=3" if kind == "rows" else "classes=10", "diffusion.log_every=1"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    code, text = launcher.run(*arguments(path, undisturbed, *changes))
    assert code == 0, text
    for step, number, expected in ((4, signal.SIGKILL, -signal.SIGKILL), (8, signal.SIGTERM, 143)):
        command = launcher.start(*arguments(path, run, *changes))
        command.until(lambda step=step: reached(run, step))
        command.send(number)
        assert command.wait() == expected, command.text
    code, text = launcher.run("train", str(run))
    assert code == 0, text
    assert "resuming from step" in text
    assert at_the_end(run) == at_the_end(undisturbed)
    assert lines(run / STAGE) == lines(undisturbed / STAGE)
    position = json.loads((run / STAGE / "state" / f"step-{STEPS}" / "position.json").read_text())["data"]
    card = tcm.Model.load(run / STAGE / "model").card
    assert position.pop("stream") == card.provenance.data
    assert card.condition.names == (writers.CLASSES if kind == "rows" else ())
    assert {lane["epoch"] for lane in position.values()} <= {1, 2}, "it went through the data more than once"


def test_two_processes(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Each reads its lanes: the losses are those of one process; resumed by two bit for bit, by one up to rounding."""
    alone, both, killed, taken_over = (tmp_path / name for name in ("alone", "both", "killed", "taken over"))
    plain = ["network.dropout=0.0", "diffusion.log_every=1", "diffusion.sample_every=0"]
    code, text = launcher.run(*arguments(shards, alone, *plain))
    assert code == 0, text
    shared = [*plain, "diffusion.accumulation=2"]
    ended = launcher.run_ranks(2, *arguments(shards, both, *shared))
    assert [code for code, _ in ended] == [0, 0], ended
    commands = launcher.start_ranks(2, *arguments(shards, killed, *shared))
    commands[0].until(lambda: reached(killed, 8))
    for command in commands:
        command.send(signal.SIGKILL)
        command.wait()
    shutil.copytree(killed, taken_over)
    ended = launcher.run_ranks(2, "train", str(killed))
    assert [code for code, _ in ended] == [0, 0], ended
    assert fingerprint(killed) == fingerprint(both)
    code, text = launcher.run("train", str(taken_over))
    assert code == 0, text
    for run in (both, taken_over):
        assert losses(run / STAGE) == pytest.approx(losses(alone / STAGE), rel=1e-4)
    (first, text), second = launcher.run_ranks(2, *arguments(shards, tmp_path / "odd", lanes=3))
    assert text.startswith(
        "error: data.lanes=3: a stream of 8 shards is then read in 3 lanes, which 2 processes cannot"
    )
    assert (first, second) == (2, (2, ""))


class Recorded:
    """Batches, and the images that were given at each step."""

    def __init__(self, batches: BatchSource) -> None:
        self._batches = batches
        self.given: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def starting_at(self, step: int, resume: dict[str, Any] | None = None) -> Iterator[LoadedBatch]:
        for loaded in self._batches.starting_at(step, resume):
            self.given[loaded.step].append(loaded.images)
            yield loaded


def test_the_guard_takes_the_stream_back(shards: Path, tmp_path: Path) -> None:
    """Steps 5 to 7 fail with the first noise: from step 4's checkpoint on the same images come again."""
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Ill(objective, frozenset({5, 6, 7}), nan, curable=True),
        "diffusion.guard.patience=3",
    )
    batches = Recorded(StreamBatches(open_stream(shards), seed=0, batch=16, lanes=4, window=40))
    assert replace(loop, batches=batches).run(stop)
    assert {step: len(given) for step, given in batches.given.items()} == {
        step: 2 if 4 <= step < 8 else 1 for step in range(12)
    }
    assert all(torch.equal(*batches.given[step]) for step in range(4, 8))
    assert not torch.equal(batches.given[4][0], batches.given[5][0])


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(TcmError) as error:
        train(tiny_recipe(STEPS, *overrides), folder / "run")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_classes_that_nobody_says(shards: Path, tmp_path: Path) -> None:
    """Labelled shards without names: the recipe must say how many classes, unless the labels are not used."""
    path = f"data.path=stream:{shards}"
    only = 'order=["diffusion"]'
    assert refusal(tmp_path, only, path, "classes=none") == (
        f"{shards}/part-0000.tar has labels, but does not say how many classes there are; set classes"
    )
    for four in (["classes=4"], ["classes=none", "condition={kind='classes', count=4}"]):
        assert refusal(tmp_path, only, path, *four).startswith(f"{shards}/part-0000.tar: label ")
        shutil.rmtree(tmp_path / "run")
    assert refusal(tmp_path, only, path, "image_shape=[1,16,16]").startswith(f"{path} has images of shape [1, 8, 8]")
    train(tiny_recipe(2, only, path, "classes=none", "conditional=false"), tmp_path / "run")
    assert tcm.Model.load(tmp_path / "run" / STAGE / "model").card.condition is None


def test_no_labels(tmp_path: Path) -> None:
    images, _ = open_dataset("digits").read(np.arange(20))
    shards = writers.write_shards(tmp_path / "shards", images, None)
    assert refusal(tmp_path, f"data.path=stream:{shards}") == (
        f"conditional=true, but data.path=stream:{shards} has no classes; add them or set conditional=false"
    )


def test_a_stream_that_changed(shards: Path, tmp_path: Path) -> None:
    """A shard is added while the run is stopped: positions in the old shards say nothing about the new order."""
    data = tmp_path / "data"
    shutil.copytree(shards, data)
    recipe = tiny_recipe(4, 'order=["diffusion"]', f"data.path=stream:{data}")
    train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / STAGE / "model")
    shutil.copy(data / "part-0000.tar", data / "part-0008.tar")
    with pytest.raises(TcmError, match=r"data\.path=stream:.* has changed since .*run was started; .* another --run"):
        train(recipe, tmp_path / "run")
    (data / "part-0008.tar").unlink()
    train(recipe, tmp_path / "run")
