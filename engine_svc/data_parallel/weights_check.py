"""Whether ranks that are about to step together have the same weights. Pure; knows no process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.core.errors import PeersLost
from service_kit.errors import FailedPrecondition

# The reason of a rank that has other weights than those it was to step with.
WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
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


def check_weights(ranks: Sequence[RankWeights], own: int) -> None:
    """Raise where not all have the same: no rank of these steps then.

    FailedPrecondition where rank `own` is odd, else PeersLost. The group's weights are those that most of
    the ranks have that serve already, or most of all where none does; of equally many the first ones.
    """
    voters = [index for index, rank in enumerate(ranks) if rank.has_stepped] or range(len(ranks))
    counts = Counter(ranks[index].number for index in voters)
    reference = max(voters, key=lambda index: (counts[ranks[index].number], -index))
    odd = [index for index, rank in enumerate(ranks) if rank.number != ranks[reference].number]
    if not odd:
        return
    other = reference if own in odd else odd[0]
    message = (
        f"this engine, rank {own}, has weights {text_of(ranks[own].number)}, and rank {other} has "
        f"{text_of(ranks[other].number)}"
    )
    if own in odd:
        raise FailedPrecondition(message, reason=WEIGHTS_MISMATCH)
    raise PeersLost(message)
