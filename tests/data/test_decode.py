"""The treatment of each kind of image, against values worked out by hand."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from tcm.data.decode import BrokenImage, channels_of, decode_picture, pixels_of


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def decoded(picture: Image.Image, kind: str = "PNG", **options: object) -> np.ndarray:
    result = decode_picture(encoded(picture, kind, **options), "a.png")
    return pixels_of(result, channels_of(result))


def test_sixteen_bits_are_rounded_to_eight() -> None:
    values = np.array([[0, 128, 129, 257, 32896, 65406, 65407, 65535]], np.uint16)
    np.testing.assert_array_equal(decoded(Image.fromarray(values))[0], [np.round(values[0] / 257)])
    np.testing.assert_array_equal(decoded(Image.fromarray(values), "TIFF")[0], [np.round(values[0] / 257)])


def test_transparency_is_composited_over_white() -> None:
    rgba = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 51]]], np.uint8)
    np.testing.assert_array_equal(
        decoded(Image.fromarray(rgba))[:, 0].T, [[255, 0, 0], [255, 255, 255], [204, 204, 204]]
    )
    grey_alpha = np.array([[[0, 255], [0, 0], [0, 51]]], np.uint8)
    np.testing.assert_array_equal(decoded(Image.fromarray(grey_alpha, "LA")), [[[0, 255, 204]]])


def test_the_transparent_value_of_a_grey_png_with_16_bits_becomes_white() -> None:
    """Pillow cannot write this chunk, which names one of 65,536 values; 300 and 301 are one grey of 8 bits."""
    data = encoded(Image.fromarray(np.array([[0, 300, 301, 65535]], np.uint16)), "PNG")
    for value, expected in ((0, [255, 1, 1, 255]), (300, [0, 255, 1, 255])):
        body = b"tRNS" + value.to_bytes(2, "big")
        chunk = (2).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
        picture = decode_picture(data.replace(data[33:], chunk + data[33:]), "a.png")
        np.testing.assert_array_equal(np.asarray(picture), [expected])


def test_palettes_are_resolved_and_their_transparency_composited() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putpixel((1, 0), 1)
    np.testing.assert_array_equal(decoded(picture)[:, 0].T, [[10, 20, 30], [40, 50, 60]])
    np.testing.assert_array_equal(decoded(picture, transparency=0)[:, 0].T, [[255, 255, 255], [40, 50, 60]])


def test_black_and_white_is_grey() -> None:
    picture = Image.fromarray(np.array([[True, False]]))
    np.testing.assert_array_equal(decoded(picture), [[[255, 0]]])


def test_cmyk_becomes_rgb() -> None:
    picture = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert decoded(picture, "TIFF")[:, 0, 0].tolist() == [255, 0, 0]


def test_only_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert decoded(frames[0], "GIF", save_all=True, append_images=frames[1:])[:, 0, 0].tolist() == [255, 0, 0]


def test_exif_orientation_is_not_applied() -> None:
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[0x0112] = 6
    assert decoded(picture, "JPEG", exif=exif).shape == (3, 4, 6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_a_truncated_image_is_an_error_that_names_it(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    with pytest.raises(BrokenImage, match=r"some/a\.img .*--skip-broken"):
        decode_picture(data[: len(data) // 2], "some/a.img")


def test_floating_point_images_are_refused() -> None:
    with pytest.raises(BrokenImage, match="floating-point"):
        decoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")


def test_a_picture_that_declares_too_many_pixels_is_refused_before_decoding() -> None:
    header = encoded(Image.new("L", (1, 1)))
    huge = header.replace((1).to_bytes(4, "big") * 2, (9000).to_bytes(4, "big") * 2, 1)
    huge = huge[:29] + zlib.crc32(huge[12:29]).to_bytes(4, "big") + huge[33:]
    with pytest.raises(BrokenImage, match="9000×9000 pixels, above the limit"):
        decode_picture(huge, "bomb.png")


def test_other_kinds_of_files_are_never_opened() -> None:
    with pytest.raises(BrokenImage, match="cannot be read as an image"):
        decode_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a.png")
