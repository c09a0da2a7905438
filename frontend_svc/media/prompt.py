"""Media in the text of a prompt, and then among its tokens. Knows no medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend_svc.media.errors import MediaRefused


@dataclass(frozen=True, slots=True)
class Expansion:
    """What stands in the text of a prompt for one medium.

    text: with the family's token once for each run of embeddings.
    run_length: the number of embeddings of a run.
    """

    text: str
    run_length: int
    num_runs: int = 1

    @property
    def num_positions(self) -> int:
        return self.num_runs * self.run_length


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions of one medium in a prompt, from its first embedding to its last.

    is_embed: a byte for each, 1 for an embedding; empty: all are embeddings.
    """

    offset: int
    length: int
    is_embed: bytes = b""


def expand(prompt: str, placeholder: str, token: str, expansions: Sequence[Expansion]) -> str:
    """The prompt with the expansions in place of its placeholders. Raises MediaRefused if some have none."""
    first, *others = prompt.split(placeholder)
    if len(others) != len(expansions):
        raise MediaRefused(
            f"the prompt has {len(others)} placeholders {placeholder!r}, must have one for each of "
            f"{len(expansions)} media"
        )
    # Not by replacing: an expansion may have a placeholder in it.
    parts = [
        expansion.text.replace(token, token * expansion.run_length) + other
        for expansion, other in zip(expansions, others, strict=True)
    ]
    return first + "".join(parts)


def placements(token_ids: Sequence[int], token_id: int, expansions: Sequence[Expansion]) -> list[Placement]:
    """Where each medium got its positions. Raises MediaRefused where the prompt has others like them."""
    positions = [position for position, each in enumerate(token_ids) if each == token_id]
    num_positions = sum(expansion.num_positions for expansion in expansions)
    if len(positions) != num_positions:
        raise MediaRefused(
            f"the prompt has {len(positions)} tokens for embeddings, its media have {num_positions}"
        )
    placed, start = [], 0
    for expansion in expansions:
        own = positions[start : start + expansion.num_positions]
        start += expansion.num_positions
        placed.append(_placement(own))
    return placed


def _placement(positions: Sequence[int]) -> Placement:
    offset, length = positions[0], positions[-1] - positions[0] + 1
    if length == len(positions):
        return Placement(offset, length)
    is_embed = bytearray(length)
    for position in positions:
        is_embed[position - offset] = 1
    return Placement(offset, length, bytes(is_embed))
