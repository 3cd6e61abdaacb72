"""Models note the hash of their data, and training never waits for it."""

import json
import os
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import writers
from inprocess import train
from launching import tiny_recipe

from tcm.data import ArrayDataset, open_dataset
from tcm.data.order import global_batch

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


def test_no_stage_waits_for_the_hash_of_its_data(tmp_path: Path) -> None:
    """One image, which training does not use, can be read only once both stages are done."""
    folder = writers.write_files(tmp_path / "images", FILES)
    used = np.concatenate([global_batch(len(IMAGES), 0, step, BATCH) for step in range(STEPS + 8)])
    late = folder / f"{min(set(range(1, len(IMAGES))) - set(used.tolist())):05d}.png"
    content = late.read_bytes()
    late.unlink()
    os.mkfifo(late)
    seen: list[dict[str, str | None]] = []

    def release() -> None:
        deadline = time.monotonic() + 120
        while len(noted(tmp_path / "run")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(noted(tmp_path / "run"))
        late.write_bytes(content)

    releasing = Thread(target=release, daemon=True)
    releasing.start()
    said = train(tiny_recipe(STEPS, *words(folder)), tmp_path / "run")
    releasing.join()
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
