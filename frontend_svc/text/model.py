"""A served model as the frontend sees it: tokenizer, defaults and limits, from the engine's files."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from frontend_svc.parsers.registry import NONE, ParserNames
from frontend_svc.text.tokenize.tokenizer import ModelTokenizer
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import session_pb2

logger = logging.getLogger(__name__)

# The defaults that are applied, and whether an engine accepts a value.
_APPLIED_DEFAULTS: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0.0 <= value <= 2.0,
    "top_p": lambda value: 0.0 < value <= 1.0,
    "top_k": lambda value: -1 <= value < math.inf,
    "min_p": lambda value: 0.0 <= value <= 1.0,
    "presence_penalty": lambda value: -2.0 <= value <= 2.0,
    "frequency_penalty": lambda value: -2.0 <= value <= 2.0,
    "repetition_penalty": lambda value: 0.001 <= value <= 1000.0,
    "max_new_tokens": lambda value: 1 <= value < math.inf,
}

# Keys that say nothing about how tokens are chosen, or that are read elsewhere.
_OTHER_KEYS = frozenset((
    "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "eos_token_id",
    "decoder_start_token_id", "do_sample", "use_cache", "cache_implementation", "return_dict_in_generate",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
))  # fmt: skip
# Values of other keys that change nothing, beside null, false and what is empty.
_NEUTRAL_VALUES: Mapping[str, float] = {
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "length_penalty": 1,
    "diversity_penalty": 0, "guidance_scale": 1, "penalty_alpha": 0, "num_beams": 1, "num_beam_groups": 1,
    "num_return_sequences": 1, "min_length": 0, "min_new_tokens": 0, "dola_layers": 0,
}  # fmt: skip

_ALWAYS_TAKEN_CHARS = 1024 * 1024
# Ordinary text has about four; long runs of one character have more if the vocabulary has tokens for them.
_MAX_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's sampling defaults, for parameters the client leaves unset. None: the model has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def chosen(self, sampling: sampling_pb2.SamplingParams, name: str, neutral: float) -> float:
        """The client's value of a parameter, else the model's, else `neutral`."""
        if sampling.HasField(name):
            return float(getattr(sampling, name))
        default = getattr(self, name)
        return neutral if default is None else float(default)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model by its name. Models with equal `text_key` tokenize prompts in the same way.

    score_template: for prompts of pairs of texts; empty: the tokenizer joins them.
    variants: other weights of it, by the names that requests may have in its place, with their digests.
    ready: the message in which its engine announced it, for what concerns one request option alone.
    """

    name: str
    text_key: str
    fingerprint: str
    tokenizer: ModelTokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    supported_tasks: tuple[str, ...] = ()
    class_labels: tuple[str, ...] = ()
    has_chat_template: bool = False
    score_template: str = ""
    parsers: ParserNames = field(default_factory=lambda: ParserNames(NONE, NONE))
    variants: Mapping[str, str] = field(default_factory=dict, compare=False)
    ready: session_pb2.Ready = field(default_factory=session_pb2.Ready, compare=False)

    def variant(self, name: str) -> str:
        """`name`, if it is that of a variant; empty if it is any other."""
        return name if name in self.variants and name != self.name else ""

    @property
    def max_text_chars(self) -> int:
        """Longest text that is tokenized, which keeps a task within a second or two."""
        return max(_ALWAYS_TAKEN_CHARS, _MAX_CHARS_PER_TOKEN * self.max_model_len)


# Once a file: each engine has it, and each of its restarts.
@functools.lru_cache(maxsize=64)
def read_generation_defaults(generation_config: bytes) -> GenerationDefaults:
    """The sampling defaults of a generation_config.json; empty bytes: no file. Raises ValueError."""
    values = read_json_object(generation_config)
    if unapplied := [name for name in values if not _is_applied(name, values)]:
        logger.warning("keys of generation_config.json have no effect", extra={"keys": ", ".join(unapplied)})
    # A wrong default must not make every request fail that leaves the parameter unset.
    numbers = {
        name: _number(values, name) if _is_applied(name, values) else None for name in _APPLIED_DEFAULTS
    }
    top_k, max_new_tokens = numbers["top_k"], numbers["max_new_tokens"]
    return GenerationDefaults(
        temperature=0.0 if values.get("do_sample") is False else numbers["temperature"],
        top_p=numbers["top_p"],
        top_k=None if top_k is None else int(top_k),
        min_p=numbers["min_p"],
        presence_penalty=numbers["presence_penalty"],
        frequency_penalty=numbers["frequency_penalty"],
        repetition_penalty=numbers["repetition_penalty"],
        max_new_tokens=None if max_new_tokens is None else int(max_new_tokens),
    )


def read_eos_token_ids(generation_config: bytes, config: bytes) -> tuple[int, ...]:
    """The end-of-sequence ids, the main one first: from the generation config, else the model config."""
    for content in (generation_config, config):
        value = read_json_object(content).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        ids_of_config = [
            token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)
        ]
        if ids_of_config:
            return tuple(dict.fromkeys(ids_of_config))
    return ()


def read_class_labels(config: bytes) -> tuple[str, ...]:
    """The names of a classifier's classes in a config.json, in order; empty unless all are named."""
    names = read_json_object(config).get("id2label")
    if not isinstance(names, dict):
        return ()
    labels = [names.get(str(index)) for index in range(len(names))]
    return tuple(label for label in labels if isinstance(label, str)) if None not in labels else ()


def read_json_object(content: bytes) -> Mapping[str, object]:
    """The object of a JSON file; empty for empty bytes. Raises ValueError for anything else."""
    if not content:
        return {}
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("the file does not hold a JSON object")
    return value


def _is_applied(name: str, values: Mapping[str, object]) -> bool:
    """Whether the value of a key has its effect, or has none in any case."""
    value, number = values.get(name), _number(values, name)
    if name in _OTHER_KEYS or value is None or value is False or value in ([], {}, ""):
        return True
    if name in _APPLIED_DEFAULTS:
        return number is not None and _APPLIED_DEFAULTS[name](number)
    return number is not None and number == _NEUTRAL_VALUES.get(name)


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
