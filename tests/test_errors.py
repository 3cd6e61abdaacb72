"""A validation's error as one line: the key as it is written, the value, the remedy."""

from typing import Any

import pytest
from pydantic import ValidationError

from tcm.foundation.errors import describe_validation
from tcm.weights import ModelCard

CARD = {"kind": "consistency", "network": {"kind": "ddpmpp"}, "image_shape": [1, 8, 8]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": {"kind": "ddpmpp", "channels": 0}}, "network.channels=0 must be greater than 0"),
        (
            {"network": {"kind": "ddpmpp", "chanels": 8}},
            "network.chanels is not a known key; did you mean 'channels'?",
        ),
        (
            {"network": {"kind": "ddpm"}},
            "network.kind='ddpm' is unknown; did you mean 'ddpmpp'? (name your own class as module:Class)",
        ),
        ({"network": {"channels": 8}}, "network.kind is missing; add it"),
        ({"image_shape": [1, 8]}, "image_shape[2] is missing; add it"),
        ({"t_mim": 1.0, "kind": "gan"}, "t_mim is not a known key; did you mean 't_min'?"),
        ({"t_min": 90.0}, "t_min=90.0 must lie below t_max=80.0"),
    ],
)
def test_model_card(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelCard.model_validate(CARD | change)
    assert str(describe_validation(caught.value, "config.json", ModelCard)) == f"config.json: {message}"
