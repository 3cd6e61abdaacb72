"""The small study that tests share."""

from pathlib import Path

import pytest
from measured_study import make_study
from once import once


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study; the variant `too fast` has failed with both seeds."""
    return once(tmp_path_factory, "study", make_study) / "out"
