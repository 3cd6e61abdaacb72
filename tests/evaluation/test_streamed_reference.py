"""A stream as the reference of `tcm eval`: the same scores as from the data set by index."""

from pathlib import Path

import numpy as np
import pytest
import torch
import writers
from typer.testing import CliRunner

import tcm
from tcm.cli.main import app
from tcm.data import open_dataset, open_stream
from tcm.evaluation import references
from tcm.evaluation.features import load_detector
from tcm.evaluation.references import reference_of, stream_batches, stream_reference
from tcm.evaluation.scores import Score, read_scores
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))
    images, labels = open_dataset("digits").read(np.arange(100))
    np.savez(tmp_path / "others.npz", images=open_dataset("digits").read(np.arange(100, 180))[0])
    return writers.write_shards(tmp_path / "shards", images, labels.index.numpy(), per_shard=30)


def measured(data: str, *options: str) -> list[Score]:
    arguments = ["eval", "others.npz", "--data", data, "--detector", "digits", "--metrics", "fid,kid", *options]
    result = CliRunner().invoke(app, [*arguments, "--scores", "scores.jsonl"])
    if result.exception is not None:
        raise result.exception
    return read_scores(Path("scores.jsonl"))[-2:]


def test_the_scores_are_those_of_the_data_set(shards: Path) -> None:
    by_index, streamed = measured(str(shards)), measured(f"stream:{shards}")
    assert [score.metric for score in streamed] == [score.metric for score in by_index]
    for one, other in zip(streamed, by_index, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-6)
        assert one.reference_count == other.reference_count == 100
        assert one.reference_hash != other.reference_hash, "names and sizes are no content"


def test_processes_share_the_images(shards: Path) -> None:
    stream, (whole,) = open_stream(shards), list(stream_batches(open_stream(shards), 100))
    parts = [torch.cat(list(stream_batches(stream, 7, Processes(torch.device("cpu"), rank, 3)))) for rank in range(3)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[rank::3])


def test_features_are_those_of_the_same_choice_of_images(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream without end in sight, no more than 50,000; here 40."""
    monkeypatch.setattr(references, "PAPERS_COUNT", 40)
    detector = load_detector("digits")
    streamed = stream_reference(open_stream(shards), "stream", detector, keep=True)
    by_index = reference_of(open_dataset(shards), "data", detector, keep=True)
    assert streamed.features is not None
    assert by_index.features is not None
    assert len(streamed.features) == 40
    torch.testing.assert_close(streamed.features, by_index.features)
    assert streamed.statistics.count == 100
    assert stream_reference(open_stream(shards), "stream", detector).features is None


def test_the_first_images_of_a_stream(shards: Path) -> None:
    detector, stream = load_detector("digits"), open_stream(shards)
    (shards / "part-0002.tar").write_bytes(b"not a tar")
    part = stream_reference(stream, "stream", detector, keep=True, count=50)
    expected = detector.features(torch.from_numpy(open_dataset("digits").read(np.arange(50))[0]))
    torch.testing.assert_close(part.statistics.mean, expected.double().mean(0))
    assert (part.statistics.count, len(part.features)) == (50, 50)


def test_denoising_needs_an_index(shards: Path) -> None:
    tcm.load("digits").save(Path("model"))
    arguments = ["eval", "model", "--data", f"stream:{shards}", "--detector", "digits", "--dfid", "1.0"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, TcmError)
    assert "is a stream, but this needs images by index" in str(result.exception)
