"""Makes of a medium what a model's encoder takes. Runs in text workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontend_svc.media.errors import MediaRefused, SettingsError
from frontend_svc.media.processing.decode import read_image
from frontend_svc.media.processing.families.family import ImageFamily, ModelSettings, SoundFamily, Tensors
from frontend_svc.media.processing.families.gemma3 import Gemma3
from frontend_svc.media.processing.families.idefics3 import Idefics3
from frontend_svc.media.processing.families.llava import Llava
from frontend_svc.media.processing.families.qwen2_audio import Qwen2Audio
from frontend_svc.media.processing.families.qwen2_vl import Qwen2VL
from frontend_svc.media.processing.settings import Settings
from frontend_svc.media.processing.sound import read_sound
from frontend_svc.media.prompt import Expansion

# By the model's type.
_IMAGES: Mapping[str, Callable[[ModelSettings], ImageFamily]] = {
    "gemma3": Gemma3,
    "idefics3": Idefics3,
    "llava": Llava,
    "qwen2_5_vl": Qwen2VL,
    "qwen2_vl": Qwen2VL,
    "smolvlm": Idefics3,
}
_SOUNDS: Mapping[str, Callable[[ModelSettings], SoundFamily]] = {"qwen2_audio": Qwen2Audio}


@dataclass(frozen=True, slots=True)
class Item:
    """One medium for a model. hash: of its tensors, as the engine computes it."""

    expansion: Expansion
    tensors: Tensors
    hash: str


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that say how a model takes media. Empty text: no such file."""

    config: str
    preprocessor_config: str = ""
    processor_config: str = ""
    tokenizer_config: str = ""


class MediaProcessor:
    """Processes media of one modality, `image` or `audio`, for one model.

    options: values of a request for settings of the processor.
    Raises SettingsError for files or options that are not served.
    """

    def __init__(self, files: ModelFiles, modality: str, options: Mapping[str, object] | None = None) -> None:
        config = _read(files.config, "config.json")
        model_type = str(config.get("model_type", ""))
        prompt = _read(files.processor_config, "processor_config.json")
        processor = prompt.get("image_processor" if modality == "image" else "feature_extractor")
        if not isinstance(processor, dict):
            processor = _read(files.preprocessor_config, "preprocessor_config.json")
        settings = ModelSettings(
            Settings(config),
            Settings({**processor, **(options or {})}),
            Settings(prompt),
            Settings(_read(files.tokenizer_config, "tokenizer_config.json")),
        )
        self._images: ImageFamily | None = None
        self._sounds: SoundFamily | None = None
        if modality == "image" and model_type in _IMAGES:
            self._images = _IMAGES[model_type](settings)
        elif modality == "audio" and model_type in _SOUNDS:
            self._sounds = _SOUNDS[model_type](settings)
        family = self._images or self._sounds
        if family is None:
            raise SettingsError(f"models of type {model_type!r} take no {modality}")
        if unknown := sorted(set(options or ()) - family.options):
            known = ", ".join(sorted(family.options)) or "none"
            raise SettingsError(f"{unknown[0]} is no option of models of type {model_type!r}: {known}")
        self.placeholder, self.token = family.placeholder, family.token

    def process(self, content: bytes, *, max_positions: int) -> Item:
        """The item of a medium. Raises MediaRefused, also if it takes more than `max_positions` positions."""
        if self._images is not None:
            image = read_image(content)
            expansion = self._images.expansion(image.height, image.width)
            _check_length(expansion, max_positions)
            return _item(expansion, self._images.tensors(image))
        assert self._sounds is not None, "a processor has a family"
        sound, rate = read_sound(content), self._sounds.sampling_rate
        # Before resampling, which may make a sound many times as large.
        expansion = self._sounds.expansion(sound.size_at(rate))
        _check_length(expansion, max_positions)
        return _item(expansion, self._sounds.tensors(sound.at_rate(rate)))


def digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """The hash of an item: over names, types, shapes and bytes, in the order of the names."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape = ",".join(map(str, tensor.shape))
        content.update(f"{name}:{tensor.dtype.name}:{shape};".encode())
        content.update(tensor.data)
    return content.hexdigest()


def _item(expansion: Expansion, tensors: Tensors) -> Item:
    # Contiguous, as they are sent.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return Item(expansion, contiguous, digest(contiguous))


def _check_length(expansion: Expansion, max_positions: int) -> None:
    if expansion.num_positions > max_positions:
        raise MediaRefused(
            f"it takes {expansion.num_positions} positions of the prompt, the model takes {max_positions} "
            "at most"
        )


def _read(text: str, name: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{name} has no object")
    return values
