"""How the fields of a request are drawn. Knows no entry, no process and no answer."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from frontend_svc.parsers.think import THINK
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.prompt_embeds import prompt_embeds

# Mostly alike in size, so that several fill a cache that is hardly larger than the largest.
_PROMPT_LENGTHS = (1, 5, *range(24, 48))
_OUTPUT_LENGTHS = (1, 2, *range(8, 32))
# Of a session, so that all its turns together are no longer than another request.
_NUM_TURNS = (2, 3)
_FIRST_INPUT, _LATER_INPUT, _TURN_OUTPUT, _MORE_OUTPUT = 12, 6, 8, 3
_NUM_PREFIXES = 3
_PREFIX_TOKENS = 24
_EMBEDDING_DEVIATION = 0.05
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
_TAGS = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer", "minimum": 0}, "end": "</f>"}],
    "triggers": ["<f>"],
}
_CONSTRAINTS = (
    sampling_pb2.StructuredOutput(json_schema=json.dumps(_SCHEMA)),
    sampling_pb2.StructuredOutput(json_object=True),
    sampling_pb2.StructuredOutput(regex="[a-z ]{4,40}"),
    sampling_pb2.StructuredOutput(choice=sampling_pb2.StructuredChoice(choices=["yes", "no", "not yet"])),
    sampling_pb2.StructuredOutput(grammar='start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n'),
    sampling_pb2.StructuredOutput(structural_tag=json.dumps(_TAGS)),
)

_Append = inference_pb2.SessionAppend

# Returns a value for the field of the option's name, or None where it has changed the request itself.
Choose = Callable[["Draw"], Any]


@dataclass(frozen=True)
class TinyModel:
    """What draws need of a checkpoint: `plain_ids` survive being shown as text and read again."""

    tokenizer: Tokenizer
    hidden_size: int
    plain_ids: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path) -> TinyModel:
        """Of a checkpoint with a tokenizer.json."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        texts = {token_id: tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())}
        plain = [
            token_id
            for token_id, text in texts.items()
            if text.strip().isascii() and text.strip() and _encode(tokenizer, text) == [token_id]
        ]
        config = json.loads((folder / "config.json").read_text())
        return cls(tokenizer, config["hidden_size"], tuple(plain))

    @functools.cached_property
    def embeddings(self) -> np.ndarray:
        """Noise for each token, so that equal prompts of embeddings have equal rows."""
        shape = (self.tokenizer.get_vocab_size(), self.hidden_size)
        noise = np.random.default_rng(0).normal(0.0, _EMBEDDING_DEVIATION, shape)
        return noise.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Added:
    """Input of a session after its first, and the tokens that it adds."""

    append: inference_pb2.SessionAppend
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Draw:
    """One request being drawn. `prompt` becomes its input in the end, in whatever form.

    added: what makes it the start of a session.  sends_ahead: before the turns have ended.
    """

    rng: random.Random
    model: TinyModel
    request: generate_pb2.GenerateRequest = field(default_factory=generate_pb2.GenerateRequest)
    prompt: list[int] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    sends_ahead: bool = False

    @property
    def sampling(self) -> sampling_pb2.SamplingParams:
        return self.request.sampling

    def begin(self) -> None:
        """What every request has: a prompt, a length and a seed, without which no two answers are alike."""
        self.prompt = self.rng.choices(self.model.plain_ids, k=self.rng.choice(_PROMPT_LENGTHS))
        self.sampling.max_tokens = self.rng.choice(_OUTPUT_LENGTHS)
        self.sampling.seed = self.rng.getrandbits(64)

    def set(self, name: str, value: Any) -> None:
        """Set a field of the request or of its sampling, or extend it with a list."""
        message: Any = self.sampling if name in self.sampling.DESCRIPTOR.fields_by_name else self.request
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    def end(self) -> None:
        if self.request.WhichOneof("input") is None:
            self.request.token_ids.ids.extend(self.prompt)
        for one in self.added:
            if one.append.HasField("sampling"):
                one.append.sampling.CopyFrom(self.sampling)
                one.append.sampling.ClearField("seed")
                one.append.sampling.max_tokens += self.rng.randint(0, _MORE_OUTPUT)


def among(*values: object) -> Choose:
    return lambda draw: draw.rng.choice(values)


def between(least: float, most: float) -> Choose:
    """A number in that range, an integer between integers."""
    if isinstance(least, int):
        return lambda draw: draw.rng.randint(least, int(most))
    return lambda draw: draw.rng.uniform(least, most)


def some(values: tuple[str, ...], most: int) -> Choose:
    return lambda draw: draw.rng.sample(values, draw.rng.randint(1, most))


def token_ids(count: int) -> Choose:
    return lambda draw: draw.rng.sample(draw.model.plain_ids, min(count, len(draw.model.plain_ids) // 2))


def words(count: int) -> Choose:
    return lambda draw: [draw.model.tokenizer.decode([token_id]) for token_id in token_ids(count)(draw)]


def biases(draw: Draw) -> list[sampling_pb2.LogitBias]:
    ids = token_ids(40)(draw)
    return [sampling_pb2.LogitBias(token_id=each, bias=draw.rng.uniform(-6, 6)) for each in ids]


def min_tokens(draw: Draw) -> int:
    return draw.rng.randint(1, draw.sampling.max_tokens)


def repetition(draw: Draw) -> None:
    draw.sampling.repetition_detection.max_pattern_size = draw.rng.randint(1, 3)
    draw.sampling.repetition_detection.min_count = 2


def turns(draw: Draw) -> None:
    """Inputs of texts and ids, some with sampling parameters, which the end of the draw fills in."""
    rng, model = draw.rng, draw.model
    del draw.prompt[_FIRST_INPUT:]
    draw.sampling.max_tokens = rng.randint(1, _TURN_OUTPUT)
    draw.sends_ahead = rng.random() < 0.5
    for _ in range(rng.randint(*_NUM_TURNS) - 1):
        token_ids, append = rng.choices(model.plain_ids, k=rng.randint(1, _LATER_INPUT)), _Append()
        if rng.random() < 0.5:
            append.prompt = model.tokenizer.decode(token_ids)
            token_ids = _encode(model.tokenizer, append.prompt)
        else:
            append.token_ids.ids.extend(token_ids)
        if rng.random() < 0.3:
            append.sampling.SetInParent()
        draw.added.append(Added(append, tuple(token_ids)))


def shared_prefix(draw: Draw) -> None:
    """Begin with what other requests begin with, of this seed and of others."""
    prefix = random.Random(draw.rng.randrange(_NUM_PREFIXES))
    draw.prompt[:0] = prefix.choices(draw.model.plain_ids, k=_PREFIX_TOKENS)


def thinking_budget(draw: Draw) -> int:
    draw.prompt += _encode(draw.model.tokenizer, THINK.opening)
    return draw.rng.randint(0, 6)


def text_prompt(draw: Draw) -> str:
    text: str = draw.model.tokenizer.decode(draw.prompt, skip_special_tokens=False)
    return text


def embeds_prompt(draw: Draw) -> None:
    """Embeddings at all positions or at some of them."""
    num = len(draw.prompt)
    is_token = [False] * num
    if draw.rng.random() < 0.5:
        is_token = [draw.rng.random() < 0.5 for _ in range(num - 1)] + [False]
    rows = draw.model.embeddings[draw.prompt]
    ids = draw.prompt if any(is_token) else ()
    embeds = prompt_embeds(memoryview(rows), rows.shape, "float32", token_ids=ids, is_token=is_token)
    draw.request.embeds.CopyFrom(embeds)


def structured_output(draw: Draw) -> None:
    """A constraint of any kind, from the first token or after a reasoning that mostly does not end."""
    asked = draw.sampling.structured_output
    asked.CopyFrom(draw.rng.choice(_CONSTRAINTS))
    if draw.rng.random() < 0.25:
        asked.start = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
