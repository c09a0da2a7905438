"""The fields of a config.json for loading its checkpoint, read with transformers or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that a config.json describes."""

    architecture: str
    vocab_size: int
    max_position: int  # the longest sequence; 0 where the config does not state it
    eos_token_id: int | list[int] | None
    dtype: torch.dtype | None  # None: that of the weights
    config: Any  # further attributes, under the names that transformers gives them
    # None where the config was read without transformers: a native decoder runs it.
    model_class: type[PreTrainedModel] | None
