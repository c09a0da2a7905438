"""Arithmetic of images, with the same results as transformers' image processors of its Pillow backend.

Images are in RGB, arrays [height, width, channel] of bytes until they are normalized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from frontend_svc.media.errors import MediaRefused
from frontend_svc.media.processing.decode import MAX_PIXELS
from frontend_svc.media.processing.settings import Settings

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Normalization:
    """What becomes of a byte: `table[channel, byte]`, as float32."""

    table: Floats

    @classmethod
    def read(cls, settings: Settings, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalization:
        """From the settings of a processor; `mean` and `std` are its defaults."""
        values = np.arange(256, dtype=np.float32)
        if settings.flag("do_rescale", default=True):
            values = (values.astype(np.float64) * settings.number("rescale_factor", 1 / 255)).astype(
                np.float32
            )
        if not settings.flag("do_normalize", default=True):
            return cls(np.broadcast_to(values, (3, 256)))
        means = np.array(settings.triple("image_mean", mean), dtype=np.float32)[:, None]
        stds = np.array(settings.triple("image_std", std), dtype=np.float32)[:, None]
        return cls((values - means) / stds)

    def apply(self, pixels: Pixels) -> Floats:
        """[height, width, 3] of bytes to [3, height, width]."""
        return np.stack([self.table[channel][pixels[:, :, channel]] for channel in range(3)])


def resize(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    """The image in another size. Raises MediaRefused for one that an image of odd proportions would get."""
    check_size(height, width)
    return image.resize((width, height), resample=Image.Resampling(resample))


def check_size(height: int, width: int) -> None:
    """Raise MediaRefused for a size that a worker has no memory for."""
    if height * width > MAX_PIXELS:
        raise MediaRefused(
            f"the model takes the image as one of {width} x {height} pixels, must be at most {MAX_PIXELS}"
        )


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle of an image; where it is smaller, zeros beside it."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    full_height, full_width = max(height, pixels.shape[0]), max(width, pixels.shape[1])
    padded = np.zeros((full_height, full_width, 3), dtype=np.uint8)
    top_pad, left_pad = -((pixels.shape[0] - full_height) // 2), -((pixels.shape[1] - full_width) // 2)
    padded[top_pad : top_pad + pixels.shape[0], left_pad : left_pad + pixels.shape[1]] = pixels
    top, left = top + top_pad, left + left_pad
    return padded[max(0, top) : min(full_height, top + height), max(0, left) : min(full_width, left + width)]


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width with the shorter one of `edge`, in the same proportion, rounded down."""
    longer = int(edge * max(height, width) / min(height, width))
    return (longer, edge) if width <= height else (edge, longer)
