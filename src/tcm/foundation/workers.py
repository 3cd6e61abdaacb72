"""Jobs side by side: each worker is a separate process, by default one that computes with one thread."""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.signals import STOP_SIGNALS, StopRequest

Send = Callable[[Any], None]
"""Sends a message to the process that started the worker."""

Begin = Callable[[int], None]
"""Prepares a worker, given its number, before its first job: its threads, its device. It travels by pickle."""

_CONTEXT = multiprocessing.get_context("spawn")


def one_thread(worker: int) -> None:
    """Let a worker compute with one thread."""
    from tcm.foundation.devices import fix_threads

    fix_threads(1)


@dataclass(frozen=True)
class Job:
    """Work for a worker, to begin when the jobs named in `after` are done.

    `work` travels to the worker by pickle. It returns false if it was asked to stop before its end, and did.
    """

    name: str
    work: Callable[[Send, StopRequest], bool]
    after: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Said:
    message: Any


@dataclass(frozen=True)
class _Warned:
    text: str


@dataclass(frozen=True)
class _Ended:
    finished: bool
    failure: Exception | None = None
    alive: bool = True


def side_by_side(
    jobs: Iterable[Job],
    workers: int,
    stop: StopRequest,
    hear: Callable[[Any], None],
    begin: Begin = one_thread,
    failed: Callable[[Job, Exception], None] | None = None,
) -> set[str]:
    """Carry out jobs in up to `workers` processes, in their order where they can; returns the names of those done.

    `hear` is called with each message of a job. Once `stop` is set or a job has failed, no other begins, and those that
    run are asked to stop; a failure is raised when they have. If `failed` is given, it is called with a failure
    instead, and all jobs that do not need the one that failed are still carried out.
    """
    waiting, done = list(jobs), set[str]()
    awaited = {job.name for job in waiting}
    failure: Exception | None = None
    team = _Team(workers, begin)
    try:
        while True:
            if not stop and failure is None:
                for job in [job for job in waiting if not job.after & awaited - done][: team.free]:
                    waiting.remove(job)
                    team.begin(job)
            if not team.busy:
                break
            for job, heard in team.messages():
                match heard:
                    case _Said(message):
                        hear(message)
                    case _Warned(text):
                        warnings.warn(text, TcmWarning, stacklevel=2)
                    case _Ended(finished=True):
                        done.add(job.name)
                    case _Ended(alive=False) if stop:
                        pass  # ended by the signal that stops all
                    case _Ended(failure=Exception() as error) if failed is not None:
                        failed(job, error)
                    case _Ended():
                        failure = failure or heard.failure
            if stop or failure is not None:
                team.ask_to_stop(stop.by or "another job failed")
        if failure is not None:
            raise failure
        return done
    finally:
        team.end()


class _Team:
    """Up to `count` workers: those who are `busy` with a job, by their connection, and those who are idle."""

    def __init__(self, count: int, begin: Begin) -> None:
        self.busy: dict[Connection, _Worker] = {}
        self._idle: list[_Worker] = []
        self._begin = begin
        self._numbers = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """How many more jobs can begin."""
        return len(self._idle) + len(self._numbers)

    def begin(self, job: Job) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._numbers.pop(), self._begin)
        self.busy[worker.connection] = worker
        worker.begin(job)

    def messages(self) -> "Iterator[tuple[Job, _Said | _Warned | _Ended]]":
        """What has been heard by now, each with its job; a worker whose job has ended is free again."""
        for connection in wait(list(self.busy), timeout=0.1):
            worker = self.busy[connection]  # type: ignore[index]  # they are the keys that were given
            heard = worker.receive()
            if isinstance(heard, _Ended):
                del self.busy[worker.connection]
                if heard.alive:
                    self._idle.append(worker)
                else:
                    worker.end()
                    self._numbers.append(worker.number)
            yield worker.job, heard

    def ask_to_stop(self, reason: str) -> None:
        for worker in self.busy.values():
            worker.ask_to_stop(reason)

    def end(self) -> None:
        for worker in [*self._idle, *self.busy.values()]:
            worker.end()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back the signals that stop a run while a process starts.

    A terminal sends them to that process too, which cannot ignore them yet.
    """
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it starts with the first process, and then lets the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """The process of a worker, as the one that started it sees it."""

    def __init__(self, number: int, begin: Begin) -> None:
        self.number = number
        self.connection, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(there, number, begin))
        with _signals_held():
            self._process.start()
        there.close()  # now the connection ends with the process
        self._asked = False

    def begin(self, job: Job) -> None:
        self.job = job
        self._send(job)

    def receive(self) -> "_Said | _Warned | _Ended":
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            advice = "if memory is short, use fewer workers; then resume"
            error = TcmError(f"{self.job.name}: its process ended with exit code {code}; {advice}")
            return _Ended(False, error, alive=False)

    def ask_to_stop(self, reason: str) -> None:
        if not self._asked:
            self._send(reason)
        self._asked = True

    def _send(self, message: Job | str) -> None:
        with suppress(OSError):  # of a process that has died, `receive` says so
            self.connection.send(message)

    def end(self) -> None:
        """At once: what a job writes is whole or not there."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, number: int, begin: Begin) -> None:
    """The life of a worker: one job after another."""
    for wanted in STOP_SIGNALS:
        # Ctrl-C reaches all processes of a terminal; this one hears from the one that started it.
        signal.signal(wanted, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    stop, jobs = StopRequest(patient=True), SimpleQueue[Job]()
    Thread(target=_listen, args=(connection, jobs, stop), daemon=True).start()
    begin(number)
    while True:
        job = jobs.get()
        with _warnings_sent(connection):
            ended = _carry_out(job, lambda message: connection.send(_Said(message)), stop)
        connection.send(ended)


@contextmanager
def _warnings_sent(connection: Connection) -> Iterator[None]:
    """Let the process that started this one give our warnings: it knows which it has given."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TcmWarning)
        warnings.showwarning = _sending(connection, warnings.showwarning)
        yield


def _sending(connection: Connection, usual: Callable[..., None]) -> Callable[..., None]:
    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, TcmWarning):
            connection.send(_Warned(str(message)))
        else:
            usual(message, category, *where)

    return show


def _carry_out(job: Job, send: Send, stop: StopRequest) -> _Ended:
    try:
        return _Ended(job.work(send, stop))
    except TcmError as error:
        return _Ended(False, error)
    except Exception:
        return _Ended(False, RuntimeError(f"{job.name}: {traceback.format_exc()}"))


def _listen(connection: Connection, jobs: "SimpleQueue[Job]", stop: StopRequest) -> None:
    """Take in jobs and the request to stop; end this process with the one that started it."""
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Job):
                jobs.put(message)
            else:
                stop.by = message
    except (EOFError, OSError):
        os._exit(1)
    except Exception:
        traceback.print_exc()
        os._exit(1)
