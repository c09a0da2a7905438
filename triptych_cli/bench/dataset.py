"""Prompts of a load: conversations of token ids and lengths, all from one seed. Knows no server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych_cli.bench.config import BenchServeConfig


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that a turn adds to the conversation, and how many tokens to generate."""

    token_ids: Sequence[int]
    num_output_tokens: int


# Turns of a conversation are sent one after another; a prompt is the turns before and the turn.
Conversation = Sequence[Turn]


class DatasetError(ValueError):
    """A data set that the model cannot take."""


def draw_conversations(
    config: BenchServeConfig, vocab_size: int, *, left_out: Sequence[int] = ()
) -> list[Conversation]:
    """The conversations of a run, `num_requests` turns in all. No id is in `left_out`."""
    draw = _IdSource(random.Random(f"ids-{config.seed}"), vocab_size, left_out)
    lengths = _LengthSource(random.Random(f"lengths-{config.seed}"), config.range_ratio)
    make = {"random": _random, "shared-prefix": _shared_prefix, "multi-turn": _multi_turn}[config.dataset]
    return make(config, draw.take, lengths.near)


def draw_warmup(config: BenchServeConfig, vocab_size: int, *, left_out: Sequence[int] = ()) -> list[Turn]:
    """Turns like the first ones of the run but with other ids, so that no prompt of the run is cached."""
    draw = _IdSource(random.Random(f"warmup-{config.seed}"), vocab_size, left_out)
    num_tokens = {
        "random": config.input_len,
        "shared-prefix": config.prefix_len + config.suffix_len,
        "multi-turn": config.turn_len,
    }[config.dataset]
    return [Turn(draw.take(num_tokens), config.output_len) for _ in range(config.warmup)]


def check_lengths(conversations: Sequence[Conversation], max_model_len: int | None) -> None:
    """Raise DatasetError, before anything is sent, for prompts that are too long for the model.

    max_model_len: None if the server does not say it.
    """
    longest = max(
        sum(len(turn.token_ids) + turn.num_output_tokens for turn in each) for each in conversations
    )
    if max_model_len is not None and longest > max_model_len:
        raise DatasetError(
            f"the longest sequence would have {longest} tokens, the model takes {max_model_len}:"
            " ask for shorter prompts or outputs, or fewer turns"
        )


class _IdSource:
    def __init__(self, rng: random.Random, vocab_size: int, left_out: Sequence[int]) -> None:
        self._rng = rng
        excluded = set(left_out)
        self._ids = [token_id for token_id in range(vocab_size) if token_id not in excluded]
        if not self._ids:
            raise DatasetError(f"a vocabulary of {vocab_size} ids leaves none to draw")

    def take(self, num_tokens: int) -> list[int]:
        return self._rng.choices(self._ids, k=num_tokens)


class _LengthSource:
    def __init__(self, rng: random.Random, range_ratio: float) -> None:
        self._rng = rng
        self._range_ratio = range_ratio

    def near(self, length: int) -> int:
        reach = round(length * self._range_ratio)
        return max(1, self._rng.randint(length - reach, length + reach))


_Draw = Callable[[int], list[int]]
_Near = Callable[[int], int]


def _random(config: BenchServeConfig, draw: _Draw, near: _Near) -> list[Conversation]:
    return [[Turn(draw(near(config.input_len)), near(config.output_len))] for _ in range(config.num_requests)]


def _shared_prefix(config: BenchServeConfig, draw: _Draw, near: _Near) -> list[Conversation]:
    prefixes = [draw(config.prefix_len) for _ in range(config.num_prefixes)]
    return [
        [Turn(prefixes[index % len(prefixes)] + draw(near(config.suffix_len)), near(config.output_len))]
        for index in range(config.num_requests)
    ]


def _multi_turn(config: BenchServeConfig, draw: _Draw, near: _Near) -> list[Conversation]:
    turns = [Turn(draw(near(config.turn_len)), near(config.output_len)) for _ in range(config.num_requests)]
    return [turns[start : start + config.turns] for start in range(0, len(turns), config.turns)]
