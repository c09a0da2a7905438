"""LLaVA: the states of a picture's patches in a layer of a vision model, projected to the decoder's width.

Source: Liu et al. 2023, "Visual Instruction Tuning".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LlavaEncoder:
    """module: transformers' LlavaForConditionalGeneration without its decoder."""

    module: Any
    dtype: torch.dtype

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        pixel_values = inputs["pixel_values"][None].to(self.dtype)
        features = self.module.get_image_features(pixel_values=pixel_values, return_dict=True)
        embeds: Tensor = features.pooler_output[0]
        return embeds
