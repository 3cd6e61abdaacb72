"""Record the witness: `python tests/witness/record.py` in a clone of the version whose results must not change.

It trains the three tiny recipes of this folder, keeps what a run looks like that was killed in the middle of a stage,
and what becomes of it. `finish.py` says how that is compared.
"""

import shutil
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from finish import CUTS, HERE, RECORDED, finish
from safetensors.torch import save_file


def cut(run: Path, stage: str, folder: Path) -> None:
    """A copy of a finished run as it was when `stage` had saved its first checkpoint."""
    later = [one.name for one in run.iterdir() if one.is_dir() and one.name > stage]
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(*later, ".lock"))
    for earlier in folder.glob("*/state"):
        if earlier.parent.name != stage:
            shutil.rmtree(earlier)
    for made in ("model", "roles"):
        shutil.rmtree(folder / stage / made, ignore_errors=True)
    for last in sorted((folder / stage / "state").iterdir())[1:]:
        shutil.rmtree(last)


if __name__ == "__main__":
    with TemporaryDirectory() as work:
        folder = Path(work)
        save_file(finish(folder), RECORDED)
        for recipe, stages in CUTS.items():
            for stage in stages:
                name = f"{recipe}-{stage[0]}"
                cut(folder / recipe, stage, folder / name)
                with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
                    archive.add(folder / name, name)
