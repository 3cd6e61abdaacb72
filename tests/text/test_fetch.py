"""The real encoder and the real emoji, through the real package clients."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tcm.data import fetch_dataset, open_dataset
from tcm.foundation.errors import TcmError
from tcm.text.encoders import encoder_folder, load_encoder
from tcm.text.fetch import MINILM_ENCODER, fetch_encoder


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    load_encoder.cache_clear()
    yield
    load_encoder.cache_clear()


@pytest.mark.long
def test_minilm() -> None:
    """Its sentences: the published model puts like meanings together."""
    try:
        folder = fetch_encoder("minilm")
    except TcmError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(str(error))
    encoder = load_encoder("minilm")
    assert (encoder.width, encoder.longest, encoder.sha256) == (384, 512, MINILM_ENCODER)
    found = encoder.encode(["a cat", "a kitten", "an airport"], 16)
    weights = found.mask[..., None].float()
    means = torch.nn.functional.normalize((found.tokens * weights).sum(1) / weights.sum(1), dim=1)
    likeness = means @ means.T
    assert likeness[0, 1] > 0.7 > 0.4 > likeness[0, 2]
    load_encoder.cache_clear()
    assert fetch_encoder("minilm") == folder == encoder_folder("minilm")
    weights_file = folder / "model.safetensors"
    damaged = bytearray(weights_file.read_bytes())
    damaged[-1] ^= 1
    weights_file.write_bytes(damaged)
    load_encoder.cache_clear()
    with pytest.raises(TcmError, match=r"holds an encoder with hash .*; delete it and fetch again"):
        fetch_encoder("minilm")


@pytest.mark.long
def test_emoji() -> None:
    try:
        fetch_dataset("emoji")
    except TcmError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(str(error))
    train, test = (open_dataset("emoji", split=split) for split in ("train", "test"))
    assert (train.count, test.count, train.shape) == (1809, 102, (3, 32, 32))
    assert train.captions is not None
    index = list(train.captions).index("red apple")
    red, green, blue = train.pixels(np.array([index]))[0, :, 18, 16].tolist()
    assert red > 150 > 100 > max(green, blue)
    assert "green apple" in (test.captions or ())
