"""Images of all kinds become upright RGB ones, or are refused with the reason."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from frontend_svc.media.errors import MediaRefused
from frontend_svc.media.processing.decode import MAX_PIXELS, read_image
from tests.frontend_svc.media.pictures import encoded, picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def pixels(image: Image.Image) -> list[object]:
    return [image.mode, image.size, image.tobytes()]


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def huge_png(width: int, height: int) -> bytes:
    """A PNG of about 1 KB of a picture of any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = picture(37, 23, mode=mode)
    content = encoded(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG")
    with Image.open(io.BytesIO(content)) as opened:
        assert pixels(read_image(content)) == pixels(opened.convert("RGB"))


def test_what_is_transparent_becomes_white() -> None:
    image = picture(300, 700, mode="RGBA")
    colours = np.asarray(image).astype(np.float64)
    alpha = colours[:, :, 3:] / 255
    expected = colours[:, :, :3] * alpha + 255 * (1 - alpha)
    read = np.asarray(read_image(encoded(image)))
    assert np.abs(read - expected).max() <= 1
    palette = picture(20, 10).quantize(8)
    index = palette.getpixel((3, 3))
    assert read_image(encoded(palette, transparency=index)).getpixel((3, 3)) == (255, 255, 255)
    grey = picture(20, 10, mode="L")
    level = grey.getpixel((3, 3))
    assert read_image(encoded(grey, transparency=level)).getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bits_of_grey_keep_the_highest_eight() -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    read = np.asarray(read_image(encoded(Image.fromarray(grey * 256 + 77))))
    assert (read == grey[:, :, None]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_their_metadata_say(file_format: str, orientation: int) -> None:
    image = picture(31, 17)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(image, file_format, exif=exif)
    with Image.open(io.BytesIO(content)) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert pixels(read_image(content)) == pixels(expected)


def test_a_huge_image_is_refused_by_its_header() -> None:
    for width, height in ((50_000, 50_000), (2, 1 << 30), (MAX_PIXELS + 1, 1)):
        content = huge_png(width, height)
        assert len(content) < 1200
        with pytest.raises(
            MediaRefused, match=f"has {width} x {height} pixels, must have at most {MAX_PIXELS}"
        ):
            read_image(content)


def test_animated_images_are_refused() -> None:
    frames = [picture(9, 9, seed) for seed in (1, 2)]
    for file_format in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
        with pytest.raises(MediaRefused, match="animated"):
            read_image(content)
        assert read_image(encoded(frames[0], file_format)).size == (9, 9)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no image",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"ID3\x04\x00\x00\x00\x00\x00\x00\xff\xfb\x90\x00",
        encoded(picture(9, 9), "BMP"),
        encoded(picture(9, 9), "TIFF"),
        encoded(picture(9, 9), "ICO"),
        encoded(picture(9, 9), "PPM"),
        bytes(1000),
    ],
    ids=["empty", "text", "svg", "pdf", "mp3", "bmp", "tiff", "ico", "ppm", "zeros"],
)
def test_other_formats_are_refused(content: bytes) -> None:
    with pytest.raises(MediaRefused, match="no PNG, JPEG, WebP or GIF"):
        read_image(content)


@pytest.mark.parametrize("file_format", FORMATS)
def test_damaged_images_are_refused_or_have_their_size(file_format: str) -> None:
    """200 files: truncated at 25 lengths, and with 25 runs of other bytes, in each format."""
    content = encoded(picture(61, 47), file_format)
    random = np.random.default_rng(3)
    for index in range(25):
        with pytest.raises(MediaRefused):
            read_image(content[: len(content) * index // 25])
        damaged = bytearray(content)
        start = int(random.integers(0, len(content) - 20))
        damaged[start : start + 20] = random.bytes(20)
        try:
            image = read_image(bytes(damaged))
        except MediaRefused:
            continue
        assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
