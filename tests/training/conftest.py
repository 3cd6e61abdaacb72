"""Processes to train in, and one finished run that several tests look at."""

import logging
from pathlib import Path

import pytest
from launching import Launcher, tiny
from once import once

# Distributed checkpoints log each tensor; pytest would keep it all.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Starts `tcm` in processes of its own."""
    return Launcher(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all three stages that nothing disturbed."""

    def make(folder: Path) -> None:
        code, text = Launcher(folder).run("train", "digits", *tiny(), "--run", str(folder / "run"))
        assert code == 0, text

    return once(tmp_path_factory, "finished", make) / "run"
