"""The tests of this folder need an accelerator: `make test-gpu` runs them; elsewhere they are skipped.

TCM_TEST_DEVICE=cpu runs them on the CPU, to try the tests themselves.
"""

import os

import pytest
import torch

from tcm.foundation.devices import best_device

DEVICE = torch.device(os.environ.get("TCM_TEST_DEVICE") or best_device())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")
            if DEVICE.type == "cpu" and not os.environ.get("TCM_TEST_DEVICE"):
                item.add_marker(pytest.mark.skip(reason="no accelerator here; `make test-gpu` on a machine with one"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def two_devices(device: torch.device) -> None:
    """Skip unless each of two processes can have a device of its own, as NCCL needs it."""
    if device.type != "cpu" and torch.accelerator.device_count() < 2:
        pytest.skip("two processes need two accelerators")
