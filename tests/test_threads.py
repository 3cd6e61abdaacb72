"""The number of threads: on simulated machines, whose speeds are known, and in a real stage."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inprocess import ALONE, begin, train, weights_of
from launching import tiny_recipe

from tcm.data import open_dataset
from tcm.data.loader import Batches, LoadedBatch, Resume
from tcm.foundation.signals import StopRequest
from tcm.foundation.threads import KEEP, Threads, paced, threads_restored, usable_counts
from tcm.training import stage_loop
from tcm.training.stage_loop import StageLoop

COUNTS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with threads_restored():
        yield


class Machine:
    """A clock, and work that takes `seconds` per image, by the number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.used: list[int] = []

    def clock(self) -> float:
        return self.now

    def work(self, images: int = 1) -> None:
        self.used.append(torch.get_num_threads())
        self.now += images * self.seconds[self.used[-1]]

    def share(self, count: int) -> float:
        """The speed with this number, as a share of the best."""
        return min(self.seconds.values()) / self.seconds[count]


speeds = st.fixed_dictionaries({count: st.floats(0.001, 10.0) for count in COUNTS})


def test_one_core_leaves_no_choice() -> None:
    threads = Threads([1])
    threads.settle(lambda: pytest.fail("there is nothing to measure"), 1)
    assert threads.describe() == "1 thread"


@given(speeds)
def test_the_choice_is_near_the_best(seconds: dict[int, float]) -> None:
    machine = Machine(seconds)
    threads = Threads(COUNTS, clock=machine.clock)
    threads.settle(machine.work, 1)
    assert machine.share(threads.count) >= KEEP
    fewer = [count for count in COUNTS if count < threads.count]
    assert all(machine.share(count) < 0.85 for count in fewer), "the fewest that are good enough"


@given(speeds, speeds)
def test_it_is_measured_again_when_the_load_changes(quiet: dict[int, float], busy: dict[int, float]) -> None:
    machine = Machine(quiet)
    threads = Threads(COUNTS, clock=machine.clock)
    threads.settle(machine.work, 1)
    machine.seconds, changed, cost = busy, machine.now, machine.now
    while machine.share(threads.count) < KEEP:
        threads.begin(trying=False)
        machine.work()
        threads.end(1)
        threads.settle(machine.work, 1)
        assert machine.now - changed < 200 * cost + 200 * sum(busy.values()), "it goes on below 0.8 of the best"


def test_what_is_good_enough_is_kept() -> None:
    for speed, kept in ((0.81, True), (0.79, False)):
        machine = Machine({1: 1.0, 2: speed})
        threads = Threads((1, 2), current=1, clock=machine.clock)
        assert threads.count == 1
        threads.settle(machine.work, 1)
        assert (threads.count == 1) == kept
    assert Threads((1, 2), current=16).count == 2, "a checkpoint from a larger machine"


def test_a_number_that_is_far_too_slow_is_tried_twice_at_most() -> None:
    machine = Machine({1: 0.01, 2: 0.5})
    Threads((1, 2), clock=machine.clock).settle(machine.work, 1)
    assert machine.used.count(2) == 2


def test_slow_work_is_not_tried_with_every_number() -> None:
    machine = Machine(dict.fromkeys(COUNTS, 100.0))
    threads = Threads(COUNTS, clock=machine.clock)
    threads.settle(machine.work, 1)
    assert machine.used == [8]
    assert threads.count == 8
    resumed, used = Threads(COUNTS, current=2, clock=machine.clock), len(machine.used)
    resumed.settle(machine.work, 1)
    assert machine.used[used:] == [2]
    assert resumed.count == 2, "it is not given up for one that was timed alone"


def test_batches_pass_unchanged_and_the_number_is_restored() -> None:
    torch.set_num_threads(2)
    batches = [torch.full((3,), float(number)) for number in range(40)]
    assert all(a is b for a, b in zip(paced(batches, (1, 2)), batches, strict=True))
    assert torch.get_num_threads() == 2


def test_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(6)
    assert usable_counts(ALONE) == [6], "OMP_NUM_THREADS is set in the tests"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert usable_counts(ALONE) == [1, 2, 4, 6]
    assert usable_counts(replace(ALONE, count=2)) == [6], "torchrun's processes share the cores already"


def test_a_run_notes_its_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    text = train(tiny_recipe(12), tmp_path)
    assert text.count("images/s)") == 3, "said once by each stage"
    positions = [json.loads(path.read_bytes()) for path in tmp_path.glob("*/state/step-12/position.json")]
    assert len(positions) == 3
    assert all(position["threads"] in (1, 2) for position in positions)
    assert torch.get_num_threads() == 2


def scripted(choose: Callable[[int], int], used: list[int]) -> type[Threads]:
    """Threads whose number at each step is given instead of measured; `used` gets that of each step."""

    class Scripted(Threads):
        @property
        def due(self) -> bool:
            return choose(len(used)) != self.known

        def settle(self, work: Callable[[], object], size: int) -> None:
            work()
            self.known = choose(len(used))

        def begin(self, trying: bool = True) -> None:
            super().begin(trying)
            used.append(torch.get_num_threads())

    return Scripted


class CutShort(Batches):
    """Batches of which one cannot be had."""

    def starting_at(self, step: int, resume: Resume | None = None) -> Iterator[LoadedBatch]:
        for loaded in super().starting_at(step, resume):
            if loaded.step == 7:
                raise KeyboardInterrupt
            yield loaded


def test_a_change_is_saved_at_once_and_resumed_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a resumed run would repeat steps with another number of threads, and so with other bits."""

    def loop(name: str) -> tuple[StageLoop, StopRequest]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        made, stop = begin(folder, "diffusion")
        return replace(made, thread_counts=(1, 2)), stop

    undisturbed: list[int] = []
    monkeypatch.setattr(stage_loop, "Threads", scripted(lambda step: 2 if step < 5 else 1, undisturbed))
    whole, stop = loop("whole")
    assert whole.run(stop)
    assert undisturbed == [2] * 5 + [1] * 7

    used: list[int] = []
    monkeypatch.setattr(stage_loop, "Threads", scripted(lambda step: 2 if step < 5 else 1, used))
    cut, stop = loop("cut")
    with pytest.raises(KeyboardInterrupt):
        replace(cut, batches=CutShort(open_dataset("digits"), seed=0, batch=16)).run(stop)
    assert {path.name for path in cut.checkpoints.folder.glob("step-*")} == {"step-4", "step-5"}

    resumed: list[int] = []
    monkeypatch.setattr(stage_loop, "Threads", scripted(lambda step: 1, resumed))
    cut, stop = loop("cut")
    assert cut.run(stop)
    assert resumed == [1] * 7, "from the checkpoint at step 5, which says one thread"
    assert {path.name for path in cut.checkpoints.folder.glob("step-*")} == {"step-8", "step-12"}
    ours, theirs = weights_of(cut), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
