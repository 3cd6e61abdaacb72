"""One tiny pipeline of each kind, made once."""

from pathlib import Path

import pytest
from once import once
from tiny_pipeline import tiny_pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that predicts the noise."""
    return once(tmp_path_factory, "pipeline", lambda folder: tiny_pipeline(folder / "tiny")) / "tiny"


@pytest.fixture(scope="session")
def v_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that predicts v."""
    make = lambda folder: tiny_pipeline(folder / "tiny", "v_prediction")  # noqa: E731
    return once(tmp_path_factory, "v-pipeline", make) / "tiny"
