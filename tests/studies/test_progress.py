"""What is shown while a study runs: variants by their state, and the time left."""

from io import StringIO

import pytest
from rich.console import Console

from tcm.foundation.progress import SentProgress
from tcm.studies.progress import FromJob, Ledger, StudyProgress, Task, shown

A, B = "seed-0/a", "seed-0/b"
TASKS = [
    Task("train", "diffusion", frozenset({A, B})),
    Task("measure a", "measuring", frozenset({A})),
    Task("measure b", "measuring", frozenset({B})),
]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ledger(clock: Clock, workers: int = 1) -> Ledger:
    return Ledger(TASKS, [A, B], workers, clock)


def test_variants_by_their_state(clock: Clock) -> None:
    book = ledger(clock)
    assert book.states() == {"waiting": 2}
    book.begin("train")
    assert book.states() == {"running": 2}
    book.end("train")
    assert book.states() == {"waiting": 2}
    book.begin("measure a")
    book.end("measure a")
    book.begin("measure b")
    book.fail("measure b")
    assert book.states() == {"done": 1, "failed": 1}
    assert book.summary() == "variants: 1 done, 1 failed, 0 running, 0 waiting"


def test_the_time_left_is_learned_from_the_jobs(clock: Clock) -> None:
    """From one that runs, from its share of steps in this session; then from those that ended."""
    book = ledger(clock, workers=2)
    book.begin("train")
    book.at("train", 0.5, first=True)  # resumed in the middle
    clock.now = 10.0
    book.at("train", 0.75)
    assert book.time_left() == (pytest.approx(0.25 * 40 / 2), False)
    assert book.summary().endswith("at least 5 s left")
    clock.now = 20.0
    assert book.end("train") == 20.0
    assert book.seconds == {"diffusion": [40.0]}
    book.begin("measure a")
    clock.now = 26.0
    book.end("measure a")
    assert book.time_left() == (pytest.approx(3.0), True)
    assert book.summary() == "variants: 1 done, 0 running, 1 waiting; about 3 s left"


def test_a_log_has_a_line_for_each_event(clock: Clock) -> None:
    log = StringIO()
    with shown(Console(file=log, width=200), ledger(clock)) as view:
        view.hear(FromJob("train", "begins"))
        SentProgress(lambda message: view.hear(FromJob("train", message)), "0-diffusion", 10).at(5)
        SentProgress(lambda message: view.hear(FromJob("train", message)), "0-diffusion", 10).say(
            "resuming from step 4"
        )
        view.hear(FromJob("train", "ended"))
        view.hear(FromJob("measure a", "begins"))
        view.fail("measure a", "no memory")
    assert log.getvalue().splitlines() == [
        "train: begins",
        "train: resuming from step 4",
        "train: done in 0 s; variants: 0 done, 0 running, 2 waiting; time left not known yet",
        "measure a: begins",
        "measure a: failed: no memory; variants: 0 done, 1 failed, 0 running, 1 waiting; time left not known yet",
    ]


def test_a_terminal_has_a_bar_for_each_job_that_runs(clock: Clock) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=100, record=True)
    view = StudyProgress(screen, ledger(clock))
    view.hear(FromJob("train", "begins"))
    SentProgress(lambda message: view.hear(FromJob("train", message)), "0-diffusion", 10).at(5)
    screen.print(view.table())
    text = screen.export_text()
    assert "variants: 0 done, 2 running, 0 waiting" in text
    assert "train" in text
    assert "5/10" in text
    view.hear(FromJob("train", "ended"))
    screen.print(view.table())
    assert "5/10" not in screen.export_text()
