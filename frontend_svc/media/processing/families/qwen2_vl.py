"""Qwen2-VL and Qwen2.5-VL: images keep their proportions and about their size, and become patches."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from frontend_svc.media.errors import MediaRefused, SettingsError
from frontend_svc.media.processing.families.family import ModelSettings, Tensors
from frontend_svc.media.processing.pixels import CLIP_MEAN, CLIP_STD, Floats, Normalization, Pixels, resize
from frontend_svc.media.prompt import Expansion

_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_PIXELS = 1 << 30
_MAX_RATIO = 200


class Qwen2VL:
    options = frozenset(("size", "min_pixels", "max_pixels"))

    def __init__(self, settings: ModelSettings) -> None:
        processor = settings.processor
        if not processor.flag("do_resize", default=True):
            raise SettingsError("do_resize false is not served: images of any size have no whole patches")
        size = processor.section("size")
        # Older files have these two, which take precedence.
        self._min_pixels = processor.whole(
            "min_pixels", size.whole("shortest_edge", _MIN_PIXELS, maximum=_MOST_PIXELS), maximum=_MOST_PIXELS
        )
        self._max_pixels = processor.whole(
            "max_pixels", size.whole("longest_edge", _MAX_PIXELS, maximum=_MOST_PIXELS), maximum=_MOST_PIXELS
        )
        self._patch = processor.whole("patch_size", 14)
        self._num_times = processor.whole("temporal_patch_size", 2)
        self._merge = processor.whole("merge_size", 2)
        self._resample = processor.whole("resample", Image.Resampling.BICUBIC, minimum=0, maximum=5)
        self._normalization = Normalization.read(processor, CLIP_MEAN, CLIP_STD)
        self.placeholder = self.token = settings.token("image_token", "<|image_pad|>")

    def expansion(self, height: int, width: int) -> Expansion:
        height, width = self._resized(height, width)
        num = (height // self._patch) * (width // self._patch) // self._merge**2
        return Expansion(self.token, num)

    def tensors(self, image: Image.Image) -> Tensors:
        height, width = self._resized(image.height, image.width)
        pixels = np.asarray(resize(image, height, width, self._resample))
        grid = np.array([1, height // self._patch, width // self._patch], dtype=np.int64)
        return {"pixel_values": self._patches(pixels), "image_grid_thw": grid}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """A size of whole merged patches, within the limits of the number of pixels."""
        if max(height, width) / min(height, width) > _MAX_RATIO:
            raise MediaRefused(
                f"the image has {width} x {height} pixels, the longer edge must have at most "
                f"{_MAX_RATIO} times those of the other"
            )
        factor = self._patch * self._merge
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self._max_pixels:
            scale = math.sqrt((height * width) / self._max_pixels)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif new_height * new_width < self._min_pixels:
            scale = math.sqrt(self._min_pixels / (height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width

    def _patches(self, pixels: Pixels) -> Floats:
        """[height, width, 3] to [patches, 3 * times * patch * patch]; patches that merge are neighbours."""
        patch, merge, times = self._patch, self._merge, self._num_times
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        split = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # [row, column, row in it, column in it, channel, y, x]
        ordered = split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch, patch)
        patches = np.empty((rows * columns, 3, times, patch, patch), dtype=np.float32)
        for channel in range(3):
            # An image is a film in which nothing moves.
            patches[:, channel] = self._normalization.table[channel][ordered[:, channel]][:, None]
        return patches.reshape(rows * columns, -1)
