"""Kinds of layers, as far as blocks depend on them: which tokens are read again, what a hit needs.

Some layers have a state in place of keys and values: that after a token is made of that before it.
All layers of a group have the same kind and share a block table. Knows no requests, no pool and no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

NEVER = sys.maxsize

# States are kept after each fourth of the last blocks of a prompt: with blocks of 16 tokens, every 64 of 256.
_NUM_TAIL_BLOCKS, _TAIL_STEP = 16, 4

# The blocks with one block's worth of content, one in each group that is looked up together.
CachedBlock = list[int]


class AttentionKind(Protocol):
    """Properties of a group of layers. Lengths are in tokens unless the name contains blocks."""

    @property
    def block_size(self) -> int: ...

    @property
    def follows_tokens(self) -> bool:
        """Whether each token has a slot and equal prefixes have equal KV, which requests can share."""
        ...

    @property
    def num_unshared_steps(self) -> int:
        """For how many steps, from the one that writes a block on, no other request hits it.

        0: of keys and values, which all rows of a step write before any reads them.
        """
        ...

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Slots that a request fills with this number of tokens."""
        ...

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token after the computed ones reads."""
        ...

    def first_unreading(self, num_tokens: int) -> int:
        """How many tokens have to be computed before the first `num_tokens` are unread; NEVER if never."""
        ...

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """Maximum of blocks used at once until a request fills `num_tokens` slots.

        max_in_flight_tokens: of all its steps in flight.
        """
        ...

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        """The longest hit among the first `num_blocks` blocks of a request; None for blocks never read.

        Its length is a multiple of `alignment` tokens. With `drop_last` the last matched block is left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all tokens before it."""

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 0

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def first_unreading(self, num_tokens: int) -> int:
        return NEVER

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        """The blocks up to the first miss."""
        hit: list[CachedBlock | None] = []
        for index in range(num_blocks):
            cached = find(index)
            if cached is None:
                break
            hit.append(cached)
        if drop_last and hit:
            hit.pop()
        return _aligned(hit, self.block_size, alignment)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Every token reads itself and the `window` - 1 tokens before it."""

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 0
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, must be at least 1")

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """A slot per token; slots of unread tokens are released as the window moves on."""
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the next token's window."""
        return max(0, num_computed_tokens - self.window + 1)

    def first_unreading(self, num_tokens: int) -> int:
        return num_tokens + self.window - 1

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """The window and the tokens in flight, and one block more as neither need begin with a block."""
        num_held = min(self.window - 1 + max_in_flight_tokens, num_tokens)
        return min(-(-num_held // self.block_size) + 1, -(-num_tokens // self.block_size))

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        """The last run of blocks that fills the window; else the run from the first block."""
        num_needed = -(-(self.window - 1) // self.block_size) + drop_last
        hit: list[CachedBlock | None] = [None] * num_blocks
        num_run = 0
        for index in range(num_blocks - 1, -1, -1):
            cached = find(index)
            if cached is None:
                num_run = 0
                continue
            if num_run == 0 and (index + (not drop_last)) * self.block_size % alignment:
                # No hit can end here.
                continue
            hit[index] = cached
            num_run += 1
            if num_run >= num_needed:
                del hit[index + num_run :]
                break
        else:
            del hit[num_run:]
            hit = _aligned(hit, self.block_size, alignment)
        if drop_last and hit:
            hit.pop()
            hit = _aligned(hit, self.block_size, alignment)
        return hit


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Every token reads itself and those before it in its own chunk of `chunk` tokens."""

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 0
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}, must be at least 1")

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """A slot per token; slots of earlier chunks are released."""
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """Tokens of complete chunks."""
        return num_computed_tokens // self.chunk * self.chunk

    def first_unreading(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk) * self.chunk

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """A chunk and the tokens in flight, and one block more if a chunk need not begin with a block."""
        num_held = min(self.chunk + max_in_flight_tokens, num_tokens)
        num_blocks = -(-num_held // self.block_size) + bool(self.chunk % self.block_size)
        return min(num_blocks, -(-num_tokens // self.block_size))

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        """Nothing before the chunk that the longest hit ends in; from there to the first miss."""
        first = self.num_unread_tokens(num_blocks * self.block_size) // self.block_size
        hit: list[CachedBlock | None] = [None] * first
        for index in range(first, num_blocks):
            cached = find(index)
            if cached is None:
                break
            hit.append(cached)
        return _aligned(hit, self.block_size, alignment)


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Every token reads an encoder's output: KV of a fixed length, computed once."""

    block_size: int
    follows_tokens: ClassVar[bool] = False
    num_unshared_steps: ClassVar[int] = 0

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_encoder_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def first_unreading(self, num_tokens: int) -> int:
        return NEVER

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        return []


@dataclass(frozen=True, slots=True)
class SingleState:
    """A request has one state, which every step replaces, and one for each draft that a step verifies.

    No state is cached. `block_size` is the length of the longest request.
    """

    block_size: int
    follows_tokens: ClassVar[bool] = False
    num_unshared_steps: ClassVar[int] = 2
    num_speculative_blocks: int = 0

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return self.block_size * (1 + self.num_speculative_blocks)

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def first_unreading(self, num_tokens: int) -> int:
        return NEVER

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        return 1 + self.num_speculative_blocks

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        return []


@dataclass(frozen=True, slots=True)
class EveryState:
    """Block i is the state after (i + 1) * block_size tokens; every one of these states is written."""

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 2

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return _num_before_state(num_computed_tokens)

    def first_unreading(self, num_tokens: int) -> int:
        return num_tokens + 1

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        return _last_state(find, num_blocks, self.block_size, alignment)


@dataclass(frozen=True, slots=True)
class AlignedState:
    """Block i, where a step has ended there, is the state after (i + 1) * block_size tokens.

    A step writes the state at its end alone, so chunks of prompts end with blocks. Drafts have own blocks,
    after that of the state.
    """

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 2
    num_speculative_blocks: int = 0

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return _num_before_state(num_computed_tokens)

    def first_unreading(self, num_tokens: int) -> int:
        return num_tokens + 1

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """The states at the ends of two steps in flight, the one before these, and those of drafts."""
        return 3 + self.num_speculative_blocks

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        return _last_state(find, num_blocks, self.block_size, alignment)


@dataclass(frozen=True, slots=True)
class KeptState:
    """Entry i, where it is kept, is the state after (i + 1) * block_size tokens. It has a pool of slots.

    States are kept while slots are free: every `interval` tokens, after the last whole block of a prompt and
    of what is computed, and more densely before the end of a prompt, as prompts that share a beginning mostly
    differ in their ends alone. All of these are written in the middle of a step, too.
    """

    block_size: int
    follows_tokens: ClassVar[bool] = True
    num_unshared_steps: ClassVar[int] = 1
    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1 or self.interval % self.block_size:
            raise ValueError(f"interval is {self.interval}, must be a multiple of {self.block_size}")

    def keeps(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Whether the state after this number of tokens, which are whole blocks, is kept."""
        # A hit leaves a token of the prompt to compute.
        num_left = (num_prompt_tokens - 1) // self.block_size - num_tokens // self.block_size
        is_near_end = 0 < num_left <= _NUM_TAIL_BLOCKS and num_tokens % (_TAIL_STEP * self.block_size) == 0
        return num_left == 0 or is_near_end or num_tokens % self.interval == 0

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_tokens

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        return _num_before_state(num_computed_tokens)

    def first_unreading(self, num_tokens: int) -> int:
        return num_tokens + 1

    def max_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """None of the blocks for KV."""
        return 0

    def longest_hit(
        self, find: Callable[[int], CachedBlock | None], num_blocks: int, alignment: int, *, drop_last: bool
    ) -> list[CachedBlock | None]:
        return _last_state(find, num_blocks, self.block_size, alignment)


def _num_before_state(num_computed_tokens: int) -> int:
    """Only the state after the last computed token is read: the block of this token stays."""
    return max(0, num_computed_tokens - 1)


def _last_state(
    find: Callable[[int], CachedBlock | None], num_blocks: int, block_size: int, alignment: int
) -> list[CachedBlock | None]:
    """A hit ends with any state that is cached, and reads none before it."""
    for index in range(num_blocks - 1, -1, -1):
        if (index + 1) * block_size % alignment == 0 and (cached := find(index)) is not None:
            return [*([None] * index), cached]
    return []


def _aligned(hit: list[CachedBlock | None], block_size: int, alignment: int) -> list[CachedBlock | None]:
    """The longest beginning of `hit` that ends on a multiple of `alignment` tokens."""
    num_tokens = len(hit) * block_size // alignment * alignment
    return hit[: num_tokens // block_size]
