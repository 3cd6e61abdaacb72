"""Must show 2: two processes against one, with and without accumulation; sharded weights (FSDP2).

TCM_STEPS=50 compares more steps than the default.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import writers
from failing import failing_recipe
from inprocess import train
from launching import FOLDERS, STAGES, Launcher, fingerprint, lines, losses, tiny, tiny_recipe

import tcm
from tcm.recipes.resolve import to_toml

pytestmark = pytest.mark.long

STEPS = int(os.environ.get("TCM_STEPS", "5"))
PLAIN = ["network.dropout=0.0", *(f"{stage}.log_every=1" for stage in STAGES)]
QUIET = [f"{stage}.{word}" for stage in STAGES for word in ("sample_every=0", "checkpoint_every=100")]
EDM2 = 'network={kind="edm2", channels=16, channel_mult=[1, 2], blocks=1, attention=[], dropout=0.2}'


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process's run."""
    folder = tmp_path_factory.mktemp("alone")
    code, text = Launcher(folder).run("train", "digits", *tiny(STEPS, *PLAIN, *QUIET), "--run", str(folder / "run"))
    assert code == 0, text
    return folder / "run"


def compare(run: Path, other: Path) -> None:
    for folder in FOLDERS:
        for key in ("loss", "gradient_norm"):
            assert len(losses(run / folder, key)) == STEPS
            assert losses(run / folder, key) == pytest.approx(losses(other / folder, key), rel=1e-4), (folder, key)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (2, 1), (2, 2)])
def test_the_same_losses(launcher: Launcher, alone: Path, tmp_path: Path, processes: int, accumulation: int) -> None:
    recipe = tiny(STEPS, *PLAIN, *QUIET, *(f"{stage}.accumulation={accumulation}" for stage in STAGES))
    arguments = ("train", "digits", *recipe, "--run", str(tmp_path / "run"))
    ended = launcher.run_ranks(processes, *arguments) if processes > 1 else [launcher.run(*arguments)]
    assert [code for code, _ in ended] == [0] * processes, ended
    assert all(text == "" for _, text in ended[1:]), "only the first process speaks"
    compare(tmp_path / "run", alone)


@pytest.mark.slow
def test_sharded_stopped_and_resumed_alone(launcher: Launcher, alone: Path, tmp_path: Path) -> None:
    """Two processes shard the weights, are stopped, resume and are killed; one process finishes the run alone."""
    run = tmp_path / "run"
    arguments = ("train", "digits", *tiny(STEPS, *PLAIN, *QUIET), "--run", str(run))
    sharing = launcher.start_ranks(2, *arguments, "--shard")
    sharing[0].until(lambda: (run / FOLDERS[0] / "metrics.jsonl").exists() and bool(losses(run / FOLDERS[0])))
    sharing[1].send(signal.SIGTERM)  # one of them is enough
    assert [command.wait() for command in sharing] == [143, 143], sharing[0].text
    assert "a signal to another process: saved and stopped" in sharing[0].text
    sharing = launcher.start_ranks(2, *arguments, "--shard")
    sharing[0].until(lambda: (run / FOLDERS[2] / "metrics.jsonl").exists())
    for command in sharing:
        command.send(signal.SIGKILL)
        command.wait()
    code, text = launcher.run("train", str(run))
    assert code == 0, text
    assert "0-diffusion: resuming from step" in sharing[0].text
    compare(run, alone)


@pytest.mark.parametrize(
    "options", [pytest.param((), id="replicated"), pytest.param(("--shard",), id="sharded", marks=pytest.mark.slow)]
)
def test_three_processes_resume_bit_for_bit(launcher: Launcher, tmp_path: Path, options: tuple[str, ...]) -> None:
    """The sum of two numbers has one order, that of three has several: it must not change with a resume."""
    words = tiny(
        4, 'order=["diffusion"]', "diffusion.batch=6", "diffusion.checkpoint_every=2", "diffusion.sample_every=0"
    )
    words = [word for word in words if "consistency" not in word and "truncated" not in word]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ended = launcher.run_ranks(3, "train", "digits", *words, "--run", str(whole), *options)
    assert [code for code, _ in ended] == [0] * 3, ended
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / FOLDERS[0] / "model")
    shutil.rmtree(resumed / FOLDERS[0] / "state" / "step-4")
    ended = launcher.run_ranks(3, "train", str(resumed), *options)
    assert "resuming from step 2" in ended[0][1]
    assert fingerprint(resumed) == fingerprint(whole)


@pytest.mark.slow
def test_edm2_sharded(launcher: Launcher, tmp_path: Path) -> None:
    """Forced weight normalisation, scalar gains and the uncertainty head, each shared; the model loads and samples."""
    words = tiny(3, EDM2, "uncertainty=8", *QUIET, *(f"{stage}.log_every=1" for stage in STAGES))
    words = [word for word in words if not word.startswith("network.")]
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    ended = launcher.run_ranks(2, "train", "digits", *words, "--run", str(shared), "--shard")
    assert [code for code, _ in ended] == [0, 0], ended
    code, text = launcher.run("train", "digits", *words, "--run", str(whole))
    assert code == 0, text
    for folder in FOLDERS:
        assert losses(shared / folder) == pytest.approx(losses(whole / folder), rel=1e-4), folder
        images = tcm.Model.load(shared / folder / "model").sample(4)
        torch.testing.assert_close(images, tcm.Model.load(whole / folder / "model").sample(4), atol=1e-3, rtol=1e-3)
    # The other way round: a checkpoint of one process is read by two that share the weights.
    model = whole / FOLDERS[2] / "model"
    for file in model.iterdir():
        file.unlink()
    model.rmdir()
    ended = launcher.run_ranks(2, "train", str(whole), "--shard")
    assert [code for code, _ in ended] == [0, 0], ended
    assert tcm.Model.load(model).card.kind == "truncated"


def test_one_line_for_all_processes(launcher: Launcher, tmp_path: Path) -> None:
    """What is wrong is said by the first process alone, whoever finds it; all end with code 2."""
    arguments = ("train", "digits", *tiny(4, "truncated.batch=15"), "--run", str(tmp_path / "run"))
    (first, text), second = launcher.run_ranks(2, *arguments)
    assert text == "error: truncated.batch=15 cannot be shared by 2 processes with accumulation=1; use 14 or 16\n"
    assert (first, second) == (2, (2, ""))
    (first, text), second = launcher.run_ranks(2, "train", "digit")
    assert text.startswith("error: digit does not exist; did you mean digits?")
    assert (first, second) == (2, (2, ""))
    (first, text), second = launcher.run_ranks(2, "train", "digits", "--device", "cuda:7")
    assert text.startswith("error: device=cuda:7 does not exist here; use one of cpu")
    assert (first, second) == (2, (2, ""))


def test_changed_data_are_found_by_the_first_of_two(launcher: Launcher, tmp_path: Path) -> None:
    images = writers.sample_pixels(40, channels=1, height=8, width=8)
    writers.write_files(tmp_path / "images", writers.numbered(images))
    words = ["classes=none", "conditional=false", f"data.path={tmp_path / 'images'}", 'order=["diffusion"]', *QUIET]
    train(tiny_recipe(2, *words), tmp_path / "run")
    writers.write_files(tmp_path / "images", writers.numbered(255 - images))
    (first, text), second = launcher.run_ranks(2, "train", str(tmp_path / "run"))
    assert "images has changed since" in text
    assert (first, second) == (2, (2, ""))


def test_a_given_up_run_of_two(launcher: Launcher, tmp_path: Path) -> None:
    """A learning rate beyond reason, in two processes: they skip, go back and give up together."""
    words = [
        "diffusion.learning_rate=1e30", "diffusion.warmup=0", "diffusion.guard.patience=2", "diffusion.guard.retries=1",
        "diffusion.sample_every=0",
    ]  # fmt: skip
    arguments = ("train", "digits", *tiny(12, *words), "--run", str(tmp_path / "run"))
    (first, text), second = launcher.run_ranks(2, *arguments)
    assert (first, second) == (2, (2, "")), text
    assert text.splitlines()[-1].startswith("error: training does not recover: ")
    events = [line["event"] for line in lines(tmp_path / "run" / FOLDERS[0]) if "event" in line]
    assert events == ["skipped", "skipped", "went back", "skipped", "skipped", "failed"]


@pytest.mark.parametrize(
    ("rank", "error", "when", "code", "end"),
    [
        (1, "IndexError", "planning", 1, "IndexError: bad luck\n(in process 1 of 2)\n"),
        (0, "IndexError", "training", 1, "IndexError: bad luck\n(in process 0 of 2)\n"),
        (1, "IndexError", "training", 1, "IndexError: bad luck\n(in process 1 of 2)\n"),
        (1, "IndexError", "training while others are busy", 1, "IndexError: bad luck\n(in process 1 of 2)\n"),
        (0, "TcmError", "training", 2, "error: luck=bad; use good\n"),
        (1, "TcmError", "training", 2, "error: luck=bad; use good (in process 1 of 2)\n"),
        (1, "KeyboardInterrupt", "training", 130, ""),
    ],
)
def test_one_fails_while_the_others_wait(
    launcher: Launcher, tmp_path: Path, rank: int, error: str, when: str, code: int, end: str
) -> None:
    """It says why, once, and no process is left behind, wherever it is."""
    (tmp_path / "failing.toml").write_text(to_toml(failing_recipe()))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "FAIL": f"{rank} {error} {when.split()[0]}"}
    environment |= {"BUSY": "1"} if when.endswith("busy") else {}
    arguments = ("train", str(tmp_path / "failing.toml"), "--run", str(tmp_path / "run"))
    commands = launcher.start_ranks(2, *arguments, environment=environment)
    codes = [command.wait(60) for command in commands]
    assert codes == [code, code], [command.text for command in commands]
    assert commands[rank].text.endswith(end)
    for word in ("Traceback", "error", "Error"):
        assert word not in commands[1 - rank].text
