"""Latents made ahead, part by part: an interrupted command is continued, and the result is the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from scipy.spatial.distance import cdist
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.data import open_data, open_dataset, to_float, to_uint8
from tcm.data.captions import Captions
from tcm.data.encoding import Encoders, unfinished, write_encoded
from tcm.data.opening import open_pictures
from tcm.data.prepare import Form, Preparation, Prepared, prepared_images
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.report.neighbours import closeness, nearest
from tcm.text.autoencoders import Latents
from tcm.text.condition import Texts
from tcm.text.encoders import load_encoder

COUNT, PER_PART = 22, 4


def encode(data: Path, target: Path, pipeline: Path, **changes: str) -> tuple[int, list[int]]:
    """What `tcm data prepare --latents` does, in small parts; returns where the images began."""
    preparation = Preparation(open_pictures(data), Form())
    starts: list[int] = []

    def images(start: int) -> Iterator[Prepared]:
        starts.append(start)
        return prepared_images(preparation, True, 0, start)

    encoders = Encoders(Latents.of(str(pipeline)), Texts.of(load_encoder(str(pipeline))), torch.device("cpu"))
    settings = preparation.settings() | changes
    written, _ = write_encoded(target, images, preparation.annotations, encoders, settings, PER_PART)
    return written, starts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captioned files, one of which is broken."""
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    lines = ["file,caption"]
    for number in range(COUNT):
        Image.fromarray(chance.integers(0, 256, (64, 64, 3), np.uint8)).save(folder / f"{number:02d}.png")
        lines.append(f"{number:02d}.png,{('red cat', 'blue dog')[number % 2]}")
    (folder / "05.png").write_bytes(b"broken")
    (folder / "captions.csv").write_text("\n".join(lines))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_killed_and_continued(data: Path, pipeline: Path, tmp_path: Path) -> None:
    """Killed after the second part: the parts that are there stay, and the result is that of an undisturbed command."""
    encode(data, tmp_path / "whole", pipeline)
    target = tmp_path / "killed"
    code = f"import test_encoding as t; from pathlib import Path as P; t.encode(P({str(data)!r}), P({str(target)!r}), "
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    process = subprocess.Popen([sys.executable, "-c", f"{code}P({str(pipeline)!r}))"], env=environment)
    deadline = time.monotonic() + 120
    while process.poll() is None and not (unfinished(target) / "part-000001").exists():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not target.exists()
    made = {path: path.stat().st_mtime_ns for path in unfinished(target).glob("part-*/latents.npy")}
    assert 1 <= len(made) < 6
    with pytest.raises(
        TcmError, match=r"killed.part was started with another form \(.*, now tiny\); give the same options"
    ):
        encode(data, target, pipeline, form="tiny")
    written, starts = encode(data, target, pipeline)
    assert written == COUNT - 1
    assert starts[0] >= PER_PART, "what was encoded is not encoded again"
    assert content(target) == content(tmp_path / "whole")
    assert not unfinished(target).exists()
    assert (target / "part-000000" / "latents.npy").stat().st_mtime_ns in made.values()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_images_are_encoded_as_they_arrive(data: Path, pipeline: Path, tmp_path: Path) -> None:
    """Not gathered first: a part's images need not fit into memory together."""
    preparation, latents = Preparation(open_pictures(data), Form()), Latents.of(str(pipeline))
    seen: list[int] = []

    class Watching(Latents):
        def encode(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(len(arrived))
            return latents.encode(images)

    arrived: list[int] = []

    def images(start: int) -> Iterator[Prepared]:
        for image in prepared_images(preparation, True, 0, start):
            arrived.append(image.number)
            yield image

    watching = Encoders(Watching(latents.vae, vae_hash=latents.vae_hash), None, torch.device("cpu"))
    write_encoded(tmp_path / "latents", images, preparation.annotations, watching, {})
    assert seen == [number + 1 for number in range(COUNT) if number != 5]
    dataset = open_dataset(tmp_path / "latents")
    assert isinstance(dataset.annotations, Captions)
    assert dataset.count == COUNT - 1


def test_the_neighbours_of_samples_are_looked_for_among_latents(data: Path, pipeline: Path, tmp_path: Path) -> None:
    """By brute force over latents; a copy of a training image finds itself, and is shown decoded."""
    encode(data, tmp_path / "latents", pipeline)
    dataset, latents = open_dataset(tmp_path / "latents"), Latents.of(str(pipeline))
    with pytest.warns(TcmWarning, match="left out 1 of 22 images"):
        images = open_dataset(data, skip_broken=True)
    samples = torch.from_numpy(np.concatenate([images.pixels(np.array([7])), 255 - images.pixels(np.array([0, 9]))]))
    found = nearest(samples, dataset, k=2)
    encoded = latents.encode(to_float(samples)).flatten(1).numpy()
    stored = dataset.pixels(np.arange(dataset.count))
    truth = cdist(encoded, stored.reshape(len(stored), -1)) / 256**0.5
    np.testing.assert_allclose(found.distances, np.sort(truth, 1)[:, :2], rtol=1e-5, atol=1e-7)
    assert found.distances[0, 0] == 0
    decoded = latents.decode(torch.from_numpy(stored[np.argsort(truth, 1)[:, 0]]))
    assert torch.equal(found.images[:, 0], to_uint8(decoded))
    close = closeness(torch.from_numpy(images.pixels(np.arange(6))), dataset)
    assert close.samples == 0
    assert close.training > 0


def test_latents_are_no_stream(data: Path, pipeline: Path, tmp_path: Path) -> None:
    encode(data, tmp_path / "latents", pipeline)
    with pytest.raises(TcmError, match=r"latents holds latents that were made ahead, .*; leave out stream:"):
        open_data(f"stream:{tmp_path / 'latents'}")


def test_the_command(data: Path, pipeline: Path, tmp_path: Path) -> None:
    """An error before the first part leaves nothing behind; one process at a time."""
    target = tmp_path / "latents"
    words = ["data", "prepare", str(data), str(target), "--latents", str(pipeline), "--workers", "0"]
    ended = CliRunner().invoke(app, words)
    assert "05.png cannot be read as an image" in str(ended.exception)
    assert list(tmp_path.iterdir()) == []
    with FileLock(tmp_path / ".latents.part.lock"):
        ended = CliRunner().invoke(app, words)
        assert "latents.part is being written by another process; wait for it" in str(ended.exception)
    ended = CliRunner().invoke(app, [*words, "--skip-broken"])
    assert ended.exit_code == 0, ended.output
    assert f"{COUNT - 1} images" in ended.output
    assert [path.name for path in tmp_path.iterdir()] == ["latents"]
    ended = CliRunner().invoke(app, ["data", "info", str(target), "--json"])
    figures = json.loads(ended.output)
    assert (figures["shape"], figures["count"], figures["captions"]) == ([4, 8, 8], COUNT - 1, COUNT - 1)
    assert figures["latents"]["vae_hash"] == Latents.of(str(pipeline)).vae_hash
