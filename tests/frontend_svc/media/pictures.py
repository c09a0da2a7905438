"""Pictures and files of them for tests, from fixed seeds."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours with some noise, as a photo has."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (5, 7, 4), dtype=np.uint8), "RGBA")
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(smooth + random.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)
    image = Image.fromarray(noisy, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, file_format, **options)
    return content.getvalue()
