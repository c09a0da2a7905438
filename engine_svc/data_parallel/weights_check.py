"""Checks that ranks which are about to step together have the same weights. Knows no process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.core.errors import PeersLost
from triptych_kit.errors import FailedPrecondition

# The error reason of a rank with other weights than its group.
WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
_NUM_DIGITS = 16  # of a digest in hex: 64 bits, the size of a number in a message
_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class RankWeights:
    """One rank's message to the others about its weights."""

    number: int  # `number_of` their digest
    has_stepped: bool  # in an earlier group, so that it serves requests with them


def number_of(digest: str) -> int:
    """The first digits of a hex digest as a signed 64-bit number; 0 if there is none."""
    number = int(digest[:_NUM_DIGITS] or "0", 16)
    return number - _RANGE if number >= _RANGE // 2 else number


def text_of(number: int) -> str:
    """The first hex digits of the digest of this number."""
    return f"{number % _RANGE:0{_NUM_DIGITS}x}"


def check_weights(ranks: Sequence[RankWeights], own: int) -> None:
    """Raise if not all ranks have the same weights, so that none of them steps.

    FailedPrecondition if rank `own` differs from the group's weights, else PeersLost. The group's weights are
    those of most ranks that serve already, or of most ranks if none does; of equal counts, the first.
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
