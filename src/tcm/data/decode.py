"""From an image file's bytes to uint8 pixels: one defined treatment for every kind of image.

| in the file                        | becomes                                                         |
|------------------------------------|-----------------------------------------------------------------|
| grey, black and white              | 1 channel                                                       |
| grey, 16 bits                      | 1 channel, round(v / 257)                                       |
| RGB, palette, CMYK, YCbCr          | 3 channels                                                      |
| transparency (RGBA, LA, tRNS)      | composited over white                                           |
| several frames                     | the first frame                                                 |
| EXIF orientation                   | not applied, as in the tools that made ImageNet-64              |
"""

import io
import struct
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError

from tcm.data.dataset import Pixels
from tcm.foundation.errors import TcmError
from tcm.foundation.files import LARGEST_PICTURE

_RASTERS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
"""Formats that hold pixels and nothing that is run, as PostScript would be."""
_REGISTERED = Image.registered_extensions()
_FORMATS = tuple(name for name in _RASTERS if name in Image.OPEN)
EXTENSIONS = frozenset(ending for ending, name in _REGISTERED.items() if name in _FORMATS and ending != ".pfm")
"""The endings of images that this Pillow can read; a .pfm holds floating-point values."""
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_GREY = ("1", "L", *_GREY_16)
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
# What Pillow's decoders raise for damaged files, found by fuzzing; they have no common base class.
_DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class BrokenImage(TcmError):
    """One image file that cannot be used: what is wrong with it, and what helps other than to leave it out.

    >>> str(BrokenImage("a.png is empty"))
    'a.png is empty; fix or remove it, or leave it out with `tcm data prepare --skip-broken`'
    """

    def __init__(self, problem: str, remedy: str = "fix or remove it"):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        # Most commands, such as `tcm train`, have no such flag: the one that has it is named.
        return f"{self.problem}; {self.remedy}, or leave it out with `tcm data prepare --skip-broken`"


def decode_picture(data: bytes, name: str) -> Image.Image:
    """Decode an image file completely into a Pillow image of mode "L" or "RGB", by the table above."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            width, height = picture.size
            if width * height > LARGEST_PICTURE:
                raise BrokenImage(
                    f"{name} declares {width}×{height} pixels, above the limit of {LARGEST_PICTURE:,}", "scale it down"
                )
            picture.load()
            return _as_grey_or_rgb(picture, name)
    except BrokenImage:
        raise
    except UnidentifiedImageError as error:  # its own text names a Python object
        raise BrokenImage(f"{name} cannot be read as an image (not one of {', '.join(_FORMATS)})") from error
    except _DECODER_ERRORS as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise BrokenImage(f"{name} cannot be read as an image ({reason})") from error


def declared_form(data: bytes, name: str) -> tuple[int, int, int]:
    """The channels (1 or 3), height and width that an image file declares; its pixels are not decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            grey = picture.mode in (*_GREY, "LA", "La")
            return 1 if grey else 3, picture.height, picture.width
    except _DECODER_ERRORS as error:
        raise BrokenImage(f"{name} cannot be read as an image") from error


def pixels_of(picture: Image.Image, channels: int) -> Pixels:
    """Return a picture as uint8 [channels, H, W]; grey from RGB is ITU-R 601 luma, RGB from grey repeats it."""
    array = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def picture_of(pixels: Pixels) -> Image.Image:
    """Return uint8 [1 or 3, H, W] as a picture of mode "L" or "RGB"."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def png_of(picture: Image.Image) -> bytes:
    """Encode a picture as PNG."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def channels_of(picture: Image.Image) -> int:
    """Return 1 for a grey picture and 3 for one in colour."""
    return 1 if picture.mode == "L" else 3


def _as_grey_or_rgb(picture: Image.Image, name: str) -> Image.Image:
    if picture.mode in _GREY_16:
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise BrokenImage(
                f"{name} has grey values from {values.min()} to {values.max()}", "store 8 or 16 bits per value"
            )
        if "transparency" in picture.info:
            values[values == picture.info["transparency"]] = 65535
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if picture.mode == "F":
        raise BrokenImage(f"{name} holds floating-point values, whose range is unknown", "store 8 or 16 bits per value")
    if picture.mode in _TRANSPARENT or "transparency" in picture.info:
        grey = picture.mode in (*_GREY, "LA", "La")
        opaque = Image.new("RGBA", picture.size, "white")
        opaque.alpha_composite(picture.convert("RGBA"))
        return opaque.convert("L" if grey else "RGB")
    return picture.convert("L" if picture.mode in _GREY else "RGB")
