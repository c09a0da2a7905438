"""What loading a checkpoint needs of its config.json, whoever has read it."""

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
    max_position: int  # the longest sequence; 0 where nothing says
    eos_token_id: int | list[int] | None
    dtype: torch.dtype | None  # None: the weights say
    config: Any  # its further attributes, under the names that transformers gives them
    # None where transformers was not asked: a native decoder runs it.
    model_class: type[PreTrainedModel] | None
