"""Whether ranks that are about to step together have the same weights. Pure; knows no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NUM_DIGITS = 16  # of a digest in hex: what a message's number holds
_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one rank tells the others of its weights."""

    number: int  # `number_of` their digest
    has_stepped: bool  # in an earlier group, so that it serves requests by them


def number_of(digest: str) -> int:
    """The beginning of a digest in hex as a signed number of 64 bits; 0 where there is none."""
    number = int(digest[:_NUM_DIGITS] or "0", 16)
    return number - _RANGE if number >= _RANGE // 2 else number


def text_of(number: int) -> str:
    """The beginning of the digest that this number stands for."""
    return f"{number % _RANGE:0{_NUM_DIGITS}x}"


def odd_ranks(ranks: Sequence[RankWeights]) -> list[int]:
    """Those that have other weights than the group: than the first rank that serves by its own, or rank 0."""
    reference = next((rank for rank in ranks if rank.has_stepped), ranks[0])
    return [index for index, rank in enumerate(ranks) if rank.number != reference.number]


def mismatch(ranks: Sequence[RankWeights], own: int) -> str:
    """What rank `own` of these, of which some are odd, has to say of it, in words for people."""
    odd = odd_ranks(ranks)
    other = odd[0] if own not in odd else next(index for index in range(len(ranks)) if index not in odd)
    return (
        f"this engine, rank {own}, has weights {text_of(ranks[own].number)}, rank {other} has "
        f"{text_of(ranks[other].number)}"
    )
