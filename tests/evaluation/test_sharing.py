"""The hash of a data set among processes: the first finds it, and the others neither read nor give up."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from tcm.data import ArrayDataset
from tcm.foundation.errors import TcmError
from tcm.evaluation import sharing
from tcm.foundation.processes import join

class Slow(ArrayDataset):
    def content_hash(self):
        Path(sys.argv[1], f"read by {processes.rank}").touch()
        time.sleep(0.3)
        return super().content_hash()

class Broken(ArrayDataset):
    def content_hash(self):
        raise TcmError("image 3 is broken")

sharing.A_MINUTE = 0.01
with join("cpu") as processes:
    found = sharing.shared_hash(processes, Slow(np.ones((2, 1, 4, 4), np.uint8)))
    Path(sys.argv[1], f"found by {processes.rank}").write_text(found)
    try:
        sharing.shared_hash(processes, Broken(np.ones((2, 1, 4, 4), np.uint8)))
    except TcmError as error:
        Path(sys.argv[1], f"error of {processes.rank}").write_text(str(error))
    except SystemExit:
        Path(sys.argv[1], f"quiet end of {processes.rank}").touch()
"""


def test_the_first_process_hashes_for_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path / "out")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
        capture_output=True,
    )
    made = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert made.keys() == {"read by 0", "found by 0", "found by 1", "error of 0", "quiet end of 1"}
    assert made["found by 0"] == made["found by 1"]
    assert len(made["found by 0"]) == 64
    assert made["error of 0"] == "image 3 is broken"
