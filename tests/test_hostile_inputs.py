"""What strangers can put into a folder is refused: soon, in little memory, in one line."""

import json
import subprocess
import sys

import hostile_inputs
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="special files and limits of memory are POSIX's")

CONFIGS = [f"config: {name}" for name in (*hostile_inputs.CONFIGS, *hostile_inputs.RAW_CONFIGS)]
WEIGHTS = [f"{kind}: {name}" for kind in ("weights", "import") for name in hostile_inputs.WEIGHTS]
SPECIAL = ("fifo", "endless", "terminal", "socket", "folder", "loop")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """What became of each input, and the processor's seconds that it took; all in one process of limited memory."""
    command = [sys.executable, hostile_inputs.__file__, str(tmp_path_factory.mktemp("hostile"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, tuple[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [*CONFIGS, *WEIGHTS])
def test_a_hostile_model_is_refused(outcomes: dict[str, tuple[str, float]], name: str) -> None:
    outcome, seconds = outcomes[name]
    assert outcome.startswith("refused: /"), outcome
    assert "\n" not in outcome
    assert seconds < 5


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_is_refused(outcomes: dict[str, tuple[str, float]], kind: str) -> None:
    found = {name: outcome for name, outcome in outcomes.items() if name.startswith(f"{kind}: ")}
    assert len(found) >= 8
    for name, (outcome, seconds) in found.items():
        assert outcome.startswith("refused: /"), (name, outcome)
        assert seconds < 5
