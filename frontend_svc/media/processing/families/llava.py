"""LLaVA: one size for all images, with the processor of CLIP, SigLIP, or its own, which pads to a square."""

from __future__ import annotations

import numpy as np
from PIL import Image

from frontend_svc.media.errors import SettingsError
from frontend_svc.media.processing.families.family import ModelSettings, Tensors
from frontend_svc.media.processing.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    HALVES,
    Normalization,
    center_crop,
    check_size,
    resize,
    shortest_edge_size,
)
from frontend_svc.media.prompt import Expansion

_CLS_TOWERS = ("clip_vision_model", "CLIPVisionModel")


class Llava:
    options: frozenset[str] = frozenset()

    def __init__(self, settings: ModelSettings) -> None:
        processor = settings.processor
        kind = processor.text("image_processor_type", "CLIPImageProcessor").removesuffix("Fast")
        is_siglip = kind == "SiglipImageProcessor"
        if not is_siglip and kind not in ("CLIPImageProcessor", "LlavaImageProcessor"):
            raise SettingsError(f"image_processor_type {kind!r} is not served for llava")
        default = {"height": 224, "width": 224} if is_siglip else {"shortest_edge": 224}
        self._resizes = processor.flag("do_resize", default=True)
        self._size = processor.size("size", default, is_square=False)
        if self._size.has("longest_edge") or self._size.has("max_height"):
            raise SettingsError("size must be of shortest_edge, or of height and width")
        self._resample = processor.whole("resample", Image.Resampling.BICUBIC, minimum=0, maximum=5)
        self._crops = processor.flag("do_center_crop", default=not is_siglip)
        crop = processor.size("crop_size", {"height": 224, "width": 224})
        self._crop = (crop.whole("height", 224), crop.whole("width", 224)) if self._crops else (0, 0)
        mean, std = (HALVES, HALVES) if is_siglip else (CLIP_MEAN, CLIP_STD)
        self._normalization = Normalization.read(processor, mean, std)
        # Only LLaVA's own processor knows this setting.
        pads = kind == "LlavaImageProcessor" and processor.flag("do_pad", default=False)
        means = processor.triple("image_mean", mean)
        self._padding = tuple(int(value * 255) for value in means) if pads else None
        vision = settings.config.section("vision_config")
        self._patch = settings.prompt.whole("patch_size", vision.whole("patch_size", 14))
        strategy = settings.config.text("vision_feature_select_strategy", "default")
        self._drops_first = settings.prompt.text("vision_feature_select_strategy", strategy) == "default"
        has_cls = vision.text("model_type", "clip_vision_model") in _CLS_TOWERS
        self._num_additional = settings.prompt.whole("num_additional_image_tokens", int(has_cls), minimum=0)
        self.placeholder = self.token = settings.token(
            "image_token", settings.prompt.text("image_token", "<image>")
        )

    def expansion(self, height: int, width: int) -> Expansion:
        height, width = self._final_size(height, width)
        num = (height // self._patch) * (width // self._patch) + self._num_additional
        num -= self._drops_first
        return Expansion(self.token, num)

    def tensors(self, image: Image.Image) -> Tensors:
        if self._padding is not None:
            edge = max(image.size)
            check_size(edge, edge)
            square = Image.new("RGB", (edge, edge), self._padding)
            square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
            image = square
        if self._resizes:
            image = resize(image, *self._resized(image.height, image.width), self._resample)
        pixels = np.asarray(image)
        if self._crops:
            pixels = center_crop(pixels, *self._crop)
        return {"pixel_values": self._normalization.apply(pixels)}

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        if self._crops:
            return self._crop
        if self._padding is not None:
            height = width = max(height, width)
        return self._resized(height, width) if self._resizes else (height, width)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self._size.has("shortest_edge"):
            return shortest_edge_size(height, width, self._size.whole("shortest_edge", 224))
        return self._size.whole("height", 224), self._size.whole("width", 224)
