"""One tiny pipeline of each kind, made once."""

import logging
from pathlib import Path

import pytest
from launching import Launcher
from once import once
from tiny_pipeline import tiny_pipeline

# Distributed checkpoints log each tensor; pytest would keep it all.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Starts `tcm` in processes of its own."""
    return Launcher(tmp_path)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that predicts the noise."""
    return once(tmp_path_factory, "pipeline", lambda folder: tiny_pipeline(folder / "tiny")) / "tiny"


@pytest.fixture(scope="session")
def v_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that predicts v."""
    make = lambda folder: tiny_pipeline(folder / "tiny", "v_prediction")  # noqa: E731
    return once(tmp_path_factory, "v-pipeline", make) / "tiny"
