"""What a family of models makes of one medium: the inputs of its encoder, and its text in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray
from PIL import Image

from frontend_svc.media.processing.settings import Settings
from frontend_svc.media.processing.sound import Sound
from frontend_svc.media.prompt import Expansion

# By the names of the encoder's arguments.
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of a model, by their files: `processor` is of the processor of the modality."""

    config: Settings
    processor: Settings
    prompt: Settings
    tokenizer: Settings

    def token(self, name: str, default: str) -> str:
        """A special token by its name in the tokenizer's settings."""
        for settings in (self.tokenizer, self.tokenizer.section("extra_special_tokens")):
            if settings.has(name):
                return settings.text(name, default)
        return default


class ImageFamily(Protocol):
    """Models that take images in one way.

    options: settings that a request may have values of its own for.
    placeholder: what a chat template writes for an image.
    token: what stands at each position of the prompt that gets an embedding.
    expansion: of an image of this size. Raises MediaRefused where the model takes none of it.
    tensors: of an image whose size was not refused.
    """

    @property
    def options(self) -> frozenset[str]: ...

    @property
    def placeholder(self) -> str: ...

    @property
    def token(self) -> str: ...

    def expansion(self, height: int, width: int) -> Expansion: ...

    def tensors(self, image: Image.Image) -> Tensors: ...


class SoundFamily(Protocol):
    """Models that take sounds in one way, as `ImageFamily`.

    sampling_rate: that of the sounds it takes, in Hz.
    """

    @property
    def options(self) -> frozenset[str]: ...

    @property
    def placeholder(self) -> str: ...

    @property
    def token(self) -> str: ...

    @property
    def sampling_rate(self) -> int: ...

    def expansion(self, num_samples: int) -> Expansion: ...

    def tensors(self, sound: Sound) -> Tensors: ...
