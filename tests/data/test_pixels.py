"""Between uint8 and [-1, 1]: every value there and back, and the definition at the edges."""

import pytest
import torch

from tcm.data import to_float, to_uint8
from tcm.foundation.errors import TcmError

ALL = torch.arange(256, dtype=torch.uint8)


def test_every_pixel_survives_the_way_there_and_back() -> None:
    floats = to_float(ALL)
    assert floats.dtype == torch.float32
    assert floats.aminmax() == (-1, 1)
    torch.testing.assert_close(floats.double(), ALL.double() / 127.5 - 1, rtol=0, atol=1e-7)
    assert torch.equal(to_uint8(floats), ALL)


def test_truncation_and_clamping() -> None:
    # x * 127.5 + 128: 127.996 is cut to 127, not rounded; beyond the range is clamped.
    x = torch.tensor([-9.0, -1.0, -0.00003, 0.0, 0.9999, 1.0, 9.0])
    assert to_uint8(x).tolist() == [0, 0, 127, 128, 255, 255, 255]
    assert to_uint8(x.double()).tolist() == to_uint8(x).tolist()
    assert to_uint8(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [191]


def test_floats_are_not_pixels() -> None:
    with pytest.raises(TcmError, match="uint8"):
        to_float(torch.zeros(3))
