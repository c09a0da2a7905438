"""A served model as the frontend knows it: tokenizer, defaults and limits, from the engine's files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from frontend_svc.text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# Sampling defaults some models come with that are not applied: who does not ask for them goes without.
_UNAPPLIED_DEFAULTS: tuple[tuple[str, float], ...] = (
    ("repetition_penalty", 1.0),
    ("min_p", 0.0),
    ("typical_p", 1.0),
)

_ALWAYS_TAKEN_CHARS = 1024 * 1024
# Text has about four; long runs of one character in a vocabulary that has words for them have more.
_MAX_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors chose for sampling, where the client chooses nothing. None: they did not."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model by its name. `text_key` is equal where prompts are tokenized alike."""

    name: str
    text_key: str
    fingerprint: str
    tokenizer: ModelTokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    supported_tasks: tuple[str, ...] = ()
    has_chat_template: bool = False

    @property
    def max_text_chars(self) -> int:
        """How much text is tokenized at all, which keeps a piece of work within a second or two."""
        return max(_ALWAYS_TAKEN_CHARS, _MAX_CHARS_PER_TOKEN * self.max_model_len)


def read_generation_defaults(generation_config: bytes) -> GenerationDefaults:
    """The sampling defaults of a generation_config.json; empty bytes are no file. Raises ValueError."""
    values = read_json_object(generation_config)
    for name, neutral in _UNAPPLIED_DEFAULTS:
        if _number(values, name) not in (None, neutral):
            logger.warning(
                "default of the model is not applied", extra={"option": name, "value": values[name]}
            )
    temperature, top_k = _number(values, "temperature"), _number(values, "top_k")
    if values.get("do_sample") is False:
        temperature = 0.0
    max_new_tokens = _number(values, "max_new_tokens")
    return GenerationDefaults(
        temperature=temperature,
        top_p=_number(values, "top_p"),
        top_k=None if top_k is None else int(top_k),
        max_new_tokens=int(max_new_tokens) if max_new_tokens is not None and max_new_tokens >= 1 else None,
    )


def read_eos_token_ids(generation_config: bytes, config: bytes) -> tuple[int, ...]:
    """The end-of-sequence ids, the main one first: those for generation, else those of the model."""
    for content in (generation_config, config):
        value = read_json_object(content).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = [token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def read_json_object(content: bytes) -> Mapping[str, object]:
    """The object of a JSON file; empty bytes are an empty one. Raises ValueError for anything else."""
    if not content:
        return {}
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("the file does not hold a JSON object")
    return value


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
