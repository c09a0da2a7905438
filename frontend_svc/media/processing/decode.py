"""Reads images: formats by content, upright, in RGB. Knows no model."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from frontend_svc.media.errors import MediaRefused

# With the copies that conversions make, such an image takes half of the memory that a worker may have.
MAX_PIXELS = 1 << 25
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# A JPEG of several pictures has previews of the first.
_ANIMATED_FORMATS = ("PNG", "WEBP", "GIF")
_BAND_ROWS = 256
_WHITE = (255, 255, 255, 255)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The limit here is lower, and an error where Pillow only warns.
Image.MAX_IMAGE_PIXELS = None


def read_image(content: bytes) -> Image.Image:
    """The picture in `content` in RGB, turned as its EXIF data say. Raises MediaRefused.

    Its size is read first, so that a small file of a huge picture is never decoded.
    """
    with warnings.catch_warnings():
        # About damage in metadata.
        warnings.simplefilter("ignore")
        try:
            return _read(content)
        except MediaRefused:
            raise
        # Decoders raise almost anything for damaged content, also MemoryError.
        except Exception as error:
            raise MediaRefused(f"the image cannot be read: {error or type(error).__name__}") from error


def _read(content: bytes) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise MediaRefused("the content is no PNG, JPEG, WebP or GIF") from error
    if image.width * image.height > MAX_PIXELS:
        raise MediaRefused(
            f"the image has {image.width} x {image.height} pixels, must have at most {MAX_PIXELS}"
        )
    if image.format in _ANIMATED_FORMATS and getattr(image, "is_animated", False):
        raise MediaRefused("the image is animated, must be a still one")
    turned = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    upright = _to_rgb(image)
    return upright if turned is None else upright.transpose(turned)


def _to_rgb(image: Image.Image) -> Image.Image:
    """As transformers' `convert_to_rgb`: what is transparent becomes white. Needs the memory of one copy."""
    image.load()
    if image.mode.startswith("I"):
        # 16 bits of grey, of which Pillow would take the lowest 8. Of colours it takes the highest.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    opaque = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND_ROWS):
        band = image.crop((0, top, image.width, min(top + _BAND_ROWS, image.height))).convert("RGBA")
        background = Image.new("RGBA", band.size, _WHITE)
        opaque.paste(Image.alpha_composite(background, band).convert("RGB"), (0, top))
    return opaque
