"""Gemma 3: one size for all images, whatever their proportions."""

from __future__ import annotations

import numpy as np
from PIL import Image

from frontend_svc.media.errors import SettingsError
from frontend_svc.media.processing.families.family import ModelSettings, Tensors
from frontend_svc.media.processing.pixels import HALVES, Normalization, resize
from frontend_svc.media.prompt import Expansion


class Gemma3:
    options = frozenset(("do_pan_and_scan",))

    def __init__(self, settings: ModelSettings) -> None:
        processor = settings.processor
        if processor.flag("do_pan_and_scan", default=False):
            raise SettingsError("do_pan_and_scan is not served")
        if not processor.flag("do_resize", default=True):
            raise SettingsError("do_resize false is not served: the encoder takes images of one size")
        size = processor.size("size", {"height": 224, "width": 224})
        self._size = size.whole("height", 224), size.whole("width", 224)
        self._resample = processor.whole("resample", Image.Resampling.BILINEAR, minimum=0, maximum=5)
        self._normalization = Normalization.read(processor, HALVES, HALVES)
        num_positions = settings.config.whole("mm_tokens_per_image", 256)
        self._num_positions = settings.prompt.whole("image_seq_length", num_positions)
        self.placeholder = settings.token("boi_token", "<start_of_image>")
        self.token = settings.token("image_token", "<image_soft_token>")
        self._end = settings.token("eoi_token", "<end_of_image>")

    def expansion(self, height: int, width: int) -> Expansion:
        return Expansion(f"\n\n{self.placeholder}{self.token}{self._end}\n\n", self._num_positions)

    def tensors(self, image: Image.Image) -> Tensors:
        pixels = np.asarray(resize(image, *self._size, self._resample))
        return {"pixel_values": self._normalization.apply(pixels)[None]}
