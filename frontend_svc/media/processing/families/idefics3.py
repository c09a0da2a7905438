"""Idefics3 and SmolVLM: images are divided into tiles of one size, and the whole follows as the last tile."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from frontend_svc.media.errors import SettingsError
from frontend_svc.media.processing.families.family import ModelSettings, Tensors
from frontend_svc.media.processing.pixels import HALVES, Normalization, resize
from frontend_svc.media.prompt import Expansion

# Of an image before it is divided.
_MAX_EDGE = 4096


class Idefics3:
    options = frozenset(("size", "do_image_splitting"))

    def __init__(self, settings: ModelSettings) -> None:
        processor = settings.processor
        size = processor.section("size")
        self._resizes = processor.flag("do_resize", default=True)
        self._longest = size.whole("longest_edge", 4 * 364)
        if self._resizes and size.has("height"):
            raise SettingsError("size is of height and width, must be of longest_edge")
        self._tile = processor.section("max_image_size").whole("longest_edge", 364)
        self._splits = processor.flag("do_image_splitting", default=True)
        self._resample = processor.whole("resample", Image.Resampling.LANCZOS, minimum=0, maximum=5)
        self._normalization = Normalization.read(processor, HALVES, HALVES)
        self._num_positions = settings.prompt.whole("image_seq_len", 169)
        self.placeholder = self.token = settings.token("image_token", "<image>")
        self._around = settings.token("fake_image_token", "<fake_token_around_image>")
        self._whole = settings.token("global_image_token", "<global-img>")

    def expansion(self, height: int, width: int) -> Expansion:
        rows, columns = self._grid(*self._divisible(*self._resized(height, width)))
        whole = f"{self._around}{self._whole}{self.token}{self._around}"
        if not rows:
            return Expansion(whole, self._num_positions)
        lines = [
            "".join(f"{self._around}<row_{row}_col_{column}>{self.token}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        text = "".join(line + "\n" for line in lines) + "\n" + whole
        return Expansion(text, self._num_positions, rows * columns + 1)

    def tensors(self, image: Image.Image) -> Tensors:
        edge = self._tile
        if self._resizes:
            image = resize(image, *self._resized(image.height, image.width), self._resample)
        tiles: list[Image.Image] = []
        if self._splits:
            image = resize(image, *self._divisible(image.height, image.width), self._resample)
            rows, columns = self._grid(image.height, image.width)
            tiles = [
                image.crop((column * edge, row * edge, (column + 1) * edge, (row + 1) * edge))
                for row in range(rows)
                for column in range(columns)
            ]
        if tiles or not self._splits:
            image = resize(image, edge, edge, self._resample)
        tiles.append(image)
        return {"pixel_values": np.stack([self._normalization.apply(np.asarray(tile)) for tile in tiles])}

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """A size with the longest edge of the settings, the shorter one even."""
        if not self._resizes:
            return height, width
        ratio = width / height
        if width >= height:
            width, height = self._longest, int(self._longest / ratio)
            height += height % 2
        else:
            height, width = self._longest, int(self._longest * ratio)
            width += width % 2
        return _bounded(max(height, 1), max(width, 1))

    def _divisible(self, height: int, width: int) -> tuple[int, int]:
        """A size of whole tiles."""
        edge, ratio = self._tile, width / height
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return height, width

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles; none of an image that is one tile itself."""
        if not self._splits or (height <= self._tile and width <= self._tile):
            return 0, 0
        return height // self._tile, width // self._tile


def _bounded(height: int, width: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)
