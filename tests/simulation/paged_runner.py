"""A runner whose tokens depend on what stands in its KV slots, so that a wrong block shows in the output."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_svc.step import StepPlan, StepResult

VOCAB_SIZE = 40


def link(chain: int, token: int) -> int:
    """What a slot holds: a digest of its token and all before it."""
    return zlib.crc32(token.to_bytes(4, "little"), chain)


def next_token(chain: int) -> int:
    """The token that follows a sequence with this digest."""
    return zlib.crc32(b"next", chain) % VOCAB_SIZE


def digests(token_ids: Sequence[int]) -> list[int]:
    """What the slots of a sequence must hold."""
    chain, chains = 0, []
    for token in token_ids:
        chain = link(chain, token)
        chains.append(chain)
    return chains


@dataclass
class _Row:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)


class PagedRunner:
    """Knows nothing but the plans it was given. Raises AssertionError where they do not fit each other."""

    def __init__(self, block_size: int, num_drafts: int, rng: random.Random) -> None:
        self._block_size = block_size
        self._num_drafts = num_drafts
        self._rng = rng
        self._rows: dict[str, _Row] = {}
        self._slots: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        for request_id in plan.released:
            del self._rows[request_id]
        for admitted in plan.admitted:
            assert admitted.request_id not in self._rows, f"{admitted.request_id} is in the batch already"
            self._rows[admitted.request_id] = _Row(list(admitted.token_ids))
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        sampled = [self._run_row(plan, row) for row in range(len(plan.request_ids))]
        drafts = {
            request_id: self._propose(self._rows[request_id].token_ids)
            for request_id in plan.request_ids
            if self._num_drafts
        }
        return StepResult(plan.step_number, sampled, drafts)

    def _run_row(self, plan: StepPlan, index: int) -> list[int]:
        row = self._rows[plan.request_ids[index]]
        row.block_table.extend(plan.new_block_ids[index])
        drafts = plan.draft_token_ids[index]
        computed = plan.num_computed_tokens[index]
        end_known = computed + plan.num_tokens[index] - len(drafts)
        chains = digests(row.token_ids)
        for position in range(computed):
            assert self._slots[self._slot(row, position)] == chains[position], f"wrong KV at {position}"
        for position in range(computed, end_known):
            self._slots[self._slot(row, position)] = chains[position]
        chain = self._slots[self._slot(row, end_known - 1)]
        if not plan.samples[index]:
            assert end_known < len(row.token_ids), "a row that reaches its last token samples"
            assert not drafts, "a chunk has no drafts"
            return []
        assert end_known == len(row.token_ids), "a row samples at its last token"
        sampled = self._verify(row, end_known, chain, drafts)
        row.token_ids.extend(sampled)
        return sampled

    def _verify(self, row: _Row, position: int, chain: int, drafts: Sequence[int]) -> list[int]:
        """Write the KV of all drafts, accept those that are right, add the token that follows them."""
        sampled, accepting = [next_token(chain)], True
        for offset, draft in enumerate(drafts):
            chain = link(chain, draft & 0xFFFFFFFF)
            self._slots[self._slot(row, position + offset)] = chain
            accepting = accepting and draft == sampled[-1]
            if accepting:
                sampled.append(next_token(chain))
        return sampled

    def _propose(self, token_ids: Sequence[int]) -> list[int]:
        """Drafts that are right until the dice say otherwise."""
        chain, drafts = digests(token_ids)[-1], []
        for _ in range(self._rng.randint(0, self._num_drafts)):
            is_right = self._rng.random() < 0.7
            drafts.append(next_token(chain) if is_right else self._rng.randrange(VOCAB_SIZE))
            chain = link(chain, drafts[-1])
        return drafts

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_table[position // self._block_size] * self._block_size + position % self._block_size
