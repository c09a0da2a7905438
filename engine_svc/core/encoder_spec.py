"""What config.json says of the encoder of images or sound beside a decoder, for its loader and the wire.

A prompt has a placeholder token at each position that gets one of the encoder's outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE = "image"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the encoder."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The encoder of one kind of items. num_outputs: outputs for one item."""

    family: str  # config.json's model_type
    modality: str
    placeholder_id: int
    inputs: tuple[InputSpec, ...]
    num_outputs: int


def read_encoder_spec(folder: Path) -> EncoderSpec | None:
    """None: a decoder alone, or one of a type whose encoder is not served.

    Raises ValueError for a config that lacks what its type has.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        make = _FAMILIES.get(content.get("model_type"))
        return None if make is None else make(content)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: the encoder cannot be read: {error}") from error


def _llava(content: Mapping[str, Any]) -> EncoderSpec:
    """The outputs of all patches of a picture; the strategy may drop that of the class token before them."""
    vision = content.get("vision_config") or {"image_size": 336, "patch_size": 14}
    # CLIP's own where these are left out.
    size, patch = int(vision.get("image_size", 224)), int(vision.get("patch_size", 32))
    is_full = content.get("vision_feature_select_strategy", "default") == "full"
    has_class_token = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    return EncoderSpec(
        family="llava",
        modality=IMAGE,
        placeholder_id=_first(content, "image_token_id", "image_token_index", default=32_000),
        inputs=(InputSpec("pixel_values", "float32", (3, size, size)),),
        num_outputs=(size // patch) ** 2 + (is_full and has_class_token),
    )


def _first(content: Mapping[str, Any], *names: str, default: int) -> int:
    return int(next((content[name] for name in names if name in content), default))


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], EncoderSpec]] = {"llava": _llava}
