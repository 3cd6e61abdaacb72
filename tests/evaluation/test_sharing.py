"""The hash of a data set among processes: the first finds it, and the others neither read nor give up."""

import multiprocessing
import runpy
import socket
from pathlib import Path

import launching  # noqa: F401 (its fork server has imported what processes need)

SCRIPT = """
import os, time
from pathlib import Path
import numpy as np

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}

from tcm.data import ArrayDataset
from tcm.foundation.errors import TcmError
from tcm.evaluation import sharing
from tcm.foundation.processes import join

class Slow(ArrayDataset):
    def content_hash(self):
        Path(out, f"read by {rank}").touch()
        time.sleep(0.3)
        return super().content_hash()

class Broken(ArrayDataset):
    def content_hash(self):
        raise TcmError("image 3 is broken")

sharing.A_MINUTE = 0.01
with join("cpu") as processes:
    found = sharing.shared_hash(processes, Slow(np.ones((2, 1, 4, 4), np.uint8)))
    Path(out, f"found by {rank}").write_text(found)
    try:
        sharing.shared_hash(processes, Broken(np.ones((2, 1, 4, 4), np.uint8)))
    except TcmError as error:
        Path(out, f"error of {rank}").write_text(str(error))
    except SystemExit:
        Path(out, f"quiet end of {rank}").touch()
"""


def test_the_first_process_hashes_for_all(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        multiprocessing.get_context("forkserver").Process(
            target=runpy.run_path, args=(str(script), {"rank": rank, "port": port, "out": str(out)})
        )
        for rank in ("0", "1")
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    made = {path.name: path.read_text() for path in out.iterdir()}
    assert made.keys() == {"read by 0", "found by 0", "found by 1", "error of 0", "quiet end of 1"}
    assert made["found by 0"] == made["found by 1"]
    assert len(made["found by 0"]) == 64
    assert made["error of 0"] == "image 3 is broken"
