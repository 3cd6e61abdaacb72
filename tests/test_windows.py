"""What Windows lacks (resource, SIGUSR1, os.sysconf, folders that can be opened) is not needed."""

import subprocess
import sys
from pathlib import Path

import pytest
from launching import FOLDERS, tiny

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("without_posix.py")


def test_a_run_without_what_windows_lacks(tmp_path: Path) -> None:
    words = tiny(2, 'order=["diffusion"]', "diffusion.checkpoint_every=1")
    command = [sys.executable, str(SCRIPT), "train", "digits", *words, "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stage = tmp_path / "run" / FOLDERS[0]
    assert (stage / "model" / "model.safetensors").is_file()
    assert sorted(path.name for path in (stage / "state").iterdir()) == ["step-1", "step-2"]
