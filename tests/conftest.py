"""What all tests share: the number of threads, no timed properties, the golden files."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from safetensors import safe_open
from torch import Tensor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("tcm", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tcm")
# One thread here and in the processes that tests start, unless OMP_NUM_THREADS says otherwise: the networks are tiny.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def pytest_configure(config: pytest.Config) -> None:
    """Turn our warnings into errors; in pyproject.toml the filter would import tcm before its coverage is measured."""
    config.addinivalue_line("filterwarnings", "error::tcm.foundation.errors.TcmWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each worker, which gets an equal part of the list, begin with its share of the long tests.

    Then the tests left at the end, when one worker takes over from another, are short.
    """
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    modules = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("long")))
    short = [item for item in items if item.path not in modules]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        mine = modules[worker::workers]
        ordered += [item for item in items if item.path in mine]
        end = len(items) * (worker + 1) // workers
        room = max(0, end - len(ordered))
        ordered += short[:room]
        short = short[room:]
    items[:] = [*ordered, *short]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as for each of several workers: how a sum is split among threads decides its last bits."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


GOLDEN = Path(__file__).parent / "golden"
Golden = tuple[dict[str, Tensor], dict[str, object]]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """The tensors of a golden file, and its metadata."""

    def read(name: str) -> Golden:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, {key: json.loads(value) for key, value in file.metadata().items()}

    return read


@pytest.fixture(scope="session")
def numbers() -> dict:
    """golden/numbers.json."""
    return json.loads((GOLDEN / "numbers.json").read_text())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what takes too long for every run."""
    if item.get_closest_marker("slow") and not os.environ.get("TCM_SLOW"):
        pytest.skip("TCM_SLOW=1 runs it")


@pytest.fixture(scope="session", autouse=True)
def _quick_timing() -> Iterator[None]:
    """A report's images/s need no precision: those that are drawn anyway are timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tcm.report.drawing.MOST_TIMING_SECONDS", 0.0)
        yield


@pytest.fixture
def quick_look_at_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What half precision does to a stage is measured on fewer samples: batches in tests are tiny."""
    monkeypatch.setattr("tcm.training.rounding.SAMPLES", 8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Fresh weights are the same in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """One for all tests of a worker: Playwright refuses a second one in the same process."""
    from browsing import CHROMIUM, FLAGS
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
