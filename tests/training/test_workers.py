"""Jobs and stages side by side, in real processes: order, messages, failures, stops; the same bits as one by one."""

import os
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from threading import Thread

import pytest
from jobs import crash, die, die_when_idle, fail, leave_a_file, note, take_a_second, warn, work_until_stopped
from launching import Launcher, fingerprint, lines

from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.signals import StopRequest
from tcm.foundation.workers import Job, side_by_side

pytestmark = pytest.mark.long

STAGES = ("diffusion", "consistency", "truncated", "continued")
FOLDERS = [f"{index}-{stage}" for index, stage in enumerate(STAGES)]


def never() -> StopRequest:
    return StopRequest(patient=True)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_jobs_wait_for_those_they_need(tmp_path: Path) -> None:
    """In two processes of their own, which are gone afterwards."""
    heard: list[tuple[str, int]] = []
    wanted = {"last": {"left", "right"}, "left": {"first"}, "right": {"first", "done long ago"}, "first": set()}
    jobs = [Job(name, partial(note, tmp_path, name), frozenset(after)) for name, after in wanted.items()]
    assert side_by_side(jobs, 2, never(), heard.append) == set(wanted)
    assert [name for name, _ in heard][0::3] == ["first", "last"]
    assert (tmp_path / "first").read_text() == ""
    assert (tmp_path / "last").read_text() == "first left right"
    pids = {pid for _, pid in heard}
    assert len(pids) <= 2
    assert os.getpid() not in pids
    assert all(is_gone(pid) for pid in pids)


def test_a_failure_stops_the_others_and_is_raised(tmp_path: Path) -> None:
    jobs = [
        Job("long", partial(work_until_stopped, tmp_path)),
        Job("failing", partial(fail, tmp_path)),
        Job("after it", partial(note, tmp_path, "late"), frozenset({"failing"})),
        Job("not begun", partial(note, tmp_path, "late")),
    ]
    with pytest.raises(TcmError, match=r"^disk=full; free some space$"):
        side_by_side(jobs, 2, never(), print)
    assert (tmp_path / "stopped").read_text() == "another job failed"
    assert not (tmp_path / "late").exists()


def test_with_somebody_who_hears_of_failures_the_others_are_carried_out(tmp_path: Path) -> None:
    """Also by the worker that takes the number of one that died."""
    jobs = [
        Job("dying", die),
        Job("crashing", crash),
        Job("after one that failed", partial(note, tmp_path, "late"), frozenset({"dying"})),
        Job("fine", partial(note, tmp_path, "fine")),
    ]
    failures: dict[str, str] = {}

    def hear_of(job: Job, error: Exception) -> None:
        failures[job.name] = str(error)

    begin = partial(leave_a_file, tmp_path)
    assert side_by_side(jobs, 1, never(), lambda _: None, begin, hear_of) == {"fine"}
    assert "exit code -9" in failures["dying"]
    assert "ZeroDivisionError" in failures["crashing"]
    assert (tmp_path / "fine").read_text() == "begun-0"


def test_a_worker_that_dies_while_it_has_no_job(tmp_path: Path) -> None:
    """Its next job fails with an error, and the others are carried out."""
    jobs = [Job("dying", die_when_idle), Job("longer", take_a_second)]
    jobs += [Job(name, partial(note, tmp_path, name), frozenset({"longer"})) for name in ("one", "two")]
    failures: dict[str, str] = {}

    def hear_of(job: Job, error: Exception) -> None:
        failures[job.name] = str(error)

    done = side_by_side(jobs, 2, never(), lambda _: None, failed=hear_of)
    assert len(done) == 3
    (message,) = failures.values()
    assert "its process ended with exit code -9" in message


def test_ctrl_c_while_a_worker_starts(tmp_path: Path) -> None:
    """A terminal sends it to the worker too, also before that can ignore it; the job is not for the worker to stop."""

    def press() -> None:
        while not (children := active_children()):
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            for _ in range(100):
                os.kill(children[0].pid or 0, signal.SIGINT)
                time.sleep(0.01)

    presses = Thread(target=press)
    presses.start()
    assert side_by_side([Job("longer", take_a_second)], 1, never(), lambda _: None) == {"longer"}
    presses.join()


def test_warnings_of_workers_are_given_by_the_process_that_started_them() -> None:
    with pytest.warns(TcmWarning, match="few images") as given:
        side_by_side([Job("one", warn), Job("two", warn)], 2, never(), lambda _: None)
    assert len(given) == 2


def test_a_request_to_stop_reaches_the_workers(tmp_path: Path) -> None:
    stop = never()
    jobs = [
        Job("long", partial(work_until_stopped, tmp_path)),
        Job("after it", partial(note, tmp_path, "late"), frozenset({"long"})),
        Job("not begun", partial(note, tmp_path, "late")),
    ]
    assert side_by_side(jobs, 1, stop, lambda _: stop.note(signal.SIGTERM, None)) == set()
    assert (tmp_path / "stopped").read_text() == "SIGTERM"
    assert not (tmp_path / "late").exists()


def test_a_second_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    impatient, heard = StopRequest(patient=False), []

    def press_twice(message: tuple[str, int]) -> None:
        heard.append(message[1])
        impatient.note(signal.SIGINT, None)
        impatient.note(signal.SIGINT, None)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([Job("long", partial(work_until_stopped, tmp_path))], 1, impatient, press_twice)
    assert is_gone(heard[0])
    assert not (tmp_path / "stopped").exists()


def test_a_crash_and_a_death_are_errors() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^broken: Traceback.*ZeroDivisionError"):
        side_by_side([Job("broken", crash)], 1, never(), print)
    message = r"^killed: its process ended with exit code -9; if memory is short, use fewer workers; then resume$"
    with pytest.raises(TcmError, match=message):
        side_by_side([Job("killed", die)], 1, never(), print)


def tiny_demo() -> list[str]:
    network = ["network.channels=8", "network.blocks=1", "network.dropout=0.2"]
    words = ["steps=8", "batch=16", "log_every=2", "checkpoint_every=4", "sample_every=0"]
    watched = [f"{stage}.watched_images=16" for stage in STAGES[1:]]
    return ["demo", *network, "diffusion.warmup=1", *(f"*.{word}" for word in words), *watched]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose stages were trained in order, in one process with as many threads as a worker has."""
    folder, one_thread = tmp_path_factory.mktemp("one-by-one"), {"OMP_NUM_THREADS": "1"}
    code, text = Launcher(folder).run("train", *tiny_demo(), "--run", str(folder / "run"), environment=one_thread)
    assert code == 0, text
    return folder / "run"


def test_stages_side_by_side_give_the_same_bits(launcher: Launcher, one_by_one: Path, tmp_path: Path) -> None:
    code, text = launcher.run("train", *tiny_demo(), "--run", str(tmp_path / "run"), "--workers", "2")
    assert code == 0, text
    assert fingerprint(tmp_path / "run") == fingerprint(one_by_one)
    assert all(lines(tmp_path / "run" / folder) == lines(one_by_one / folder) for folder in FOLDERS)
    assert {line.partition(" ")[0] for line in text.splitlines()[:-1]} == set(FOLDERS), "whole lines, each of a stage"
    assert all("1 thread" in (tmp_path / "run" / folder / "starts.jsonl").read_text() for folder in FOLDERS)


@pytest.mark.slow
def test_killed_and_resumed(launcher: Launcher, one_by_one: Path, tmp_path: Path) -> None:
    """`kill -9` while the last two stages run; tests/cli/test_demo.py has Ctrl-C."""
    run = tmp_path / "run"
    arguments = ["train", *tiny_demo(), "--run", str(run), "--workers", "2"]
    command = launcher.start(*arguments)
    command.until(lambda: all((run / folder / "state" / "step-0").exists() for folder in FOLDERS))
    command.send(signal.SIGKILL)
    command.wait()
    code, text = launcher.run(*arguments)
    assert code == 0, text
    assert fingerprint(run) == fingerprint(one_by_one)


def test_workers_are_for_one_process(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run_ranks(2, "train", *tiny_demo(), "--run", str(tmp_path / "run"), "--workers", "2")
    assert [code for code, _ in ranks] == [2, 2]
    assert sum("workers=2 works only on the CPU and without torchrun" in text for _, text in ranks) == 1
