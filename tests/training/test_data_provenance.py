"""Models note the hash of their data, and training never waits for it."""

import json
import os
import shutil
import signal
import time
from io import StringIO
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import writers
from inprocess import ALONE, train
from launching import tiny_recipe
from rich.console import Console

from tcm.data import ArrayDataset, Dataset, open_dataset
from tcm.data.hashing import BackgroundHash
from tcm.data.order import global_batch
from tcm.foundation.errors import TcmError
from tcm.recipes.schema import Recipe
from tcm.training.run import Run

pytestmark = pytest.mark.long

IMAGES = writers.sample_pixels(200, channels=1, height=8, width=8)
FILES = writers.numbered(IMAGES)
STEPS, BATCH = 2, 4


@pytest.fixture(autouse=True)
def _decoded_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As data beyond a gigabyte are."""
    monkeypatch.setitem(open_dataset.__kwdefaults__, "memory_limit", 0)


def words(data: Path) -> list[str]:
    stages = ["diffusion", "consistency"]
    return [
        f"data.path={data}", "classes=none", "conditional=false", 'order=["diffusion", "consistency"]', "seed=0",
        *(f"{stage}.{word}" for stage in stages for word in (f"batch={BATCH}", "sample_every=0")),
    ]  # fmt: skip


def noted(run: Path) -> dict[str, str | None]:
    return {
        path.parent.parent.name: json.loads(path.read_text())["provenance"]["data"]
        for path in sorted(run.glob("*/model/config.json"))
    }


def test_no_stage_waits_for_the_hash_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that computes it is stopped until both stages are done."""
    folder = writers.write_files(tmp_path / "images", FILES)
    seen: list[dict[str, str | None]] = []

    class Late(BackgroundHash):
        def __init__(self, dataset: Dataset) -> None:
            super().__init__(dataset)
            assert self._child is not None
            self._child.send_signal(signal.SIGSTOP)
            Thread(target=self._release, daemon=True).start()

        def _release(self) -> None:
            deadline = time.monotonic() + 120
            while len(noted(tmp_path / "run")) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(noted(tmp_path / "run"))
            assert self._child is not None
            self._child.send_signal(signal.SIGCONT)

    monkeypatch.setattr("tcm.training.data_provenance.BackgroundHash", Late)
    said = train(tiny_recipe(STEPS, *words(folder)), tmp_path / "run")
    assert seen == [{"0-diffusion": None, "1-consistency": None}], "a stage waited"
    assert "computing the hash of the data" in said
    truth = ArrayDataset(IMAGES).content_hash()
    assert noted(tmp_path / "run") == {"0-diffusion": truth, "1-consistency": truth}


def test_a_model_whose_run_was_killed_before_the_hash_was_known_gets_it_on_resume(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES)
    recipe = tiny_recipe(STEPS, *words(tmp_path / "images.npy"))
    train(recipe, tmp_path / "run")
    config = tmp_path / "run" / "0-diffusion" / "model" / "config.json"
    whole = config.read_bytes()
    card = json.loads(whole)
    card["provenance"]["data"] = None
    config.write_text(json.dumps(card))
    train(recipe, tmp_path / "run")
    assert config.read_bytes() == whole
    assert set(noted(tmp_path / "run").values()) == {ArrayDataset(IMAGES).content_hash()}


def test_data_that_cannot_be_hashed_do_not_stop_a_run(tmp_path: Path) -> None:
    used = np.concatenate([global_batch(len(IMAGES), 0, step, BATCH) for step in range(STEPS + 8)])
    broken = f"{min(set(range(1, len(IMAGES))) - set(used.tolist())):05d}.png"
    path = writers.write_zip(tmp_path / "images.zip", FILES | {broken: b"broken"})
    said = train(tiny_recipe(STEPS, *words(path)), tmp_path / "run")
    assert f"the models do not record the hash of their data: {broken} cannot be read as an image" in said
    assert noted(tmp_path / "run") == {"0-diffusion": None, "1-consistency": None}


def changed(kind: str, data: Path) -> None:
    """Other pixels under the same names; of a stream, which is not read for this, there are fewer."""
    other = 255 - IMAGES
    if data.is_dir():
        shutil.rmtree(data)
    match kind:
        case "folder":
            writers.write_files(data, writers.numbered(other))
        case "zip":
            writers.write_zip(data, writers.numbered(other))
        case "shards":
            writers.write_shards(data, other[:150], None)
        case _:
            np.save(data, other)


def written(kind: str, folder: Path) -> tuple[Path, str]:
    shutil.rmtree(folder / "images", ignore_errors=True)
    match kind:
        case "folder":
            path = writers.write_files(folder / "images", FILES)
        case "zip":
            path = writers.write_zip(folder / "images.zip", FILES)
        case "shards":
            path = writers.write_shards(folder / "images", IMAGES, None)
            return path, f"stream:{path}"
        case _:
            path = folder / "images.npy"
            np.save(path, IMAGES)
    return path, str(path)


def only(data: str) -> Recipe:
    words = ["diffusion.batch=4", "diffusion.sample_every=0", "classes=none", "conditional=false"]
    return tiny_recipe(STEPS, 'order=["diffusion"]', *words, f"data.path={data}")


@pytest.mark.parametrize(
    ("kind", "in_memory"), [("folder", True), ("folder", False), ("zip", False), ("npy", True), ("shards", False)]
)
def test_changed_data_are_refused_and_touched_ones_are_not(
    kind: str, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the run is finished or was interrupted, and by a dry run too."""
    if in_memory:
        monkeypatch.setitem(open_dataset.__kwdefaults__, "memory_limit", 2**30)
    data, name = written(kind, tmp_path)
    run = tmp_path / "run"
    train(only(name), run)
    before = (run / "data-files.txt").read_text() if (run / "data-files.txt").exists() else None
    for file in [data, *data.rglob("*")]:
        os.utime(file, (1e9, 1e9))
    train(only(name), run)
    if before is not None and kind != "shards":
        assert (run / "data-files.txt").read_text() != before, "the new times are noted"
    changed(kind, data)
    with pytest.raises(TcmError, match=r"images.* has changed since .*run was started; .* another --run, or put the"):
        train(only(name), run)
    shutil.rmtree(run / "0-diffusion" / "model")
    with pytest.raises(TcmError, match="has changed since"):
        Run(only(name), run, ALONE, Console(quiet=True)).check()
    written(kind, tmp_path)
    train(only(name), run)


def test_changed_data_to_which_the_recipe_was_adapted_are_named(tmp_path: Path) -> None:
    """Their sigma_data is another now; what differs is not the recipe that the user gave."""
    data, name = written("folder", tmp_path)
    run, adapted_before = tmp_path / "run", only(name)
    train(adapted_before, run)
    adapted_now = adapted_before.model_copy(update={"sigma_data": 0.6})
    with pytest.raises(TcmError, match=r"was started with another recipe .sigma_data"):
        train(adapted_now, run)
    changed("folder", data)
    with pytest.raises(TcmError, match=r"images.* has changed since .*run was started"):
        train(adapted_now, run)


def test_data_whose_files_look_the_same_are_not_read(tmp_path: Path) -> None:
    """However many there are; a stat of each is all that a start takes."""
    folder = writers.write_files(tmp_path / "images", FILES)
    train(only(str(folder)), tmp_path / "run")
    for file in folder.glob("*.png"):
        status = file.stat()
        file.write_bytes(file.read_bytes()[::-1] if file.name != "00000.png" else file.read_bytes())
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    train(only(str(folder)), tmp_path / "run")


def test_data_that_change_before_their_hash_is_known_are_refused(tmp_path: Path) -> None:
    """As when a run on a large set is killed in its first minutes; then the times alone decide."""
    folder = writers.write_files(tmp_path / "images", FILES)
    run = tmp_path / "run"
    train(only(str(folder)), run)
    (run / "data.txt").unlink()
    shutil.rmtree(run / "0-diffusion" / "model")
    (folder / "extra.png").write_bytes(FILES["00000.png"])
    said = StringIO()
    with pytest.raises(TcmError, match="has changed since"):
        Run(only(str(folder)), run, ALONE, Console(file=said)).check()
    assert said.getvalue() == "", "there is nothing to compare their content with"
    (folder / "extra.png").unlink()
    train(only(str(folder)), run)


def test_a_run_of_the_version_before_gets_a_record_of_its_files(tmp_path: Path) -> None:
    folder = writers.write_files(tmp_path / "images", FILES)
    run = tmp_path / "run"
    train(only(str(folder)), run)
    (run / "data-files.txt").unlink()
    train(only(str(folder)), run)
    assert (run / "data-files.txt").exists()
    (run / "data-files.txt").unlink()
    changed("folder", folder)
    with pytest.raises(TcmError, match="has changed since"):
        train(only(str(folder)), run)
