"""A runner that keeps digests in KV slots and reads what attention reads: a wrong block is seen at once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import repeat, takewhile

import numpy as np

from engine_svc.cache.attention import (
    AlignedState,
    AttentionKind,
    ChunkedLocal,
    CrossAttention,
    EveryState,
    FullAttention,
    KeptState,
    SingleState,
    SlidingWindow,
)
from engine_svc.core.request import BlockTable
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult
from engine_svc.runner.input_batch import DraftEntries
from tests.simulation.broken import BrokenInvariant
from tests.simulation.digest_model import NUM_OUTPUT_TOKENS, Identity, link, next_token

UNKNOWN_DRAFT = -1
STATES = (SingleState, EveryState, AlignedState, KeptState)


def first_read(kind: AttentionKind, position: int) -> int:
    """The first position that the token at `position` reads. Computed anew here: the cache is under test."""
    match kind:
        case SlidingWindow(window=window):
            return max(0, position - window + 1)
        case ChunkedLocal(chunk=chunk):
            return position - position % chunk
        case EveryState() | AlignedState() | KeptState():
            return max(0, position - 1)
        case _:
            return 0


def num_equal(tables: Sequence[Sequence[int]]) -> int:
    """With how many entries all the tables begin."""
    columns = map(set, zip(*tables, strict=False))
    return sum(1 for _ in takewhile(lambda entries: len(entries) == 1, columns))


def encoder_blocks(identity: Identity, kind: CrossAttention) -> list[tuple[int, ...]]:
    """What the blocks of cross-attention hold, the last as far as it is filled."""
    digests, block_size = identity.encoder_digests(), kind.block_size
    return [tuple(digests[start : start + block_size]) for start in range(0, len(digests), block_size)]


class Row:
    """One request in the batch: what the plans said of it, and what its slots must hold."""

    __slots__ = ("blocks", "digests", "identity", "proposal", "tables", "token_ids")

    def __init__(self, admitted: AdmittedRequest, identity: Identity, kinds: Sequence[AttentionKind]) -> None:
        self.identity = identity
        self.token_ids = list(admitted.token_ids)
        self.tables = [list(block_ids) for block_ids in admitted.block_ids]
        self.digests: list[int] = []
        # Per group, the contents of each block that is full of known tokens; of cross-attention all blocks.
        self.blocks = [
            encoder_blocks(identity, kind) if isinstance(kind, CrossAttention) else [] for kind in kinds
        ]
        self.proposal: list[int] = []
        self.extend(kinds)

    def extend(self, kinds: Sequence[AttentionKind]) -> None:
        """Bring the digests up to the known tokens."""
        digests = self.digests
        self.identity.extend(digests, self.token_ids)
        for kind, blocks in zip(kinds, self.blocks, strict=True):
            if isinstance(kind, (CrossAttention, *STATES)):
                continue
            block_size = kind.block_size
            for start in range(len(blocks) * block_size, len(digests) - block_size + 1, block_size):
                blocks.append(tuple(digests[start : start + block_size]))


class PagedRunner:
    """Knows nothing but the plans it was given, and the identity of requests, which a feature would attach.

    A step is computed when it is launched, rows in order: later steps see what earlier ones wrote.
    """

    def __init__(
        self,
        kinds: Sequence[AttentionKind],
        rng: random.Random,
        *,
        num_drafts: int = 0,
        overlaps: bool = False,
        proposes_at_launch: bool = False,
        num_lookahead_tokens: int = 0,
        max_model_len: int = 1 << 30,
        broken_row_share: float = 0.0,
    ) -> None:
        self._kinds = kinds
        self._rng = rng
        self._num_drafts = num_drafts
        self._overlaps = overlaps
        self._proposes_at_launch = proposes_at_launch
        self._num_lookahead_tokens = num_lookahead_tokens
        self._max_model_len = max_model_len
        self._broken_row_share = broken_row_share
        self.identities: dict[str, Identity] = {}  # of requests that were added
        self.rows: dict[str, Row] = {}
        self.has_lost_plans = False  # since the last step: of the rows that they entered some are not there
        # Per group what each block holds. All groups have the same memory: a write wipes out the others'.
        self._memories: list[dict[int, tuple[int, ...]]] = [{} for _ in kinds]
        self.num_rejected_drafts = 0
        self.num_accepted_drafts = 0
        self.num_padding_drafts = 0
        self._num_drafts_of: list[int] = []  # in this step
        # Rows that read and that write a state in this step, by its block: rows run at the same time.
        self._readers: dict[int, set[str]] = {}
        self._writers: dict[int, str] = {}

    @property
    def memories(self) -> Sequence[Mapping[int, tuple[int, ...]]]:
        """Per group what each block holds."""
        return self._memories

    def run(self, plan: StepPlan) -> StepResult:
        rows = self.rows
        has_lost, self.has_lost_plans = self.has_lost_plans, False
        for request_id in plan.released:
            if rows.pop(request_id, None) is None and not has_lost:
                raise BrokenInvariant("order", f"{request_id} is released but not in the batch")
        for admitted in plan.admitted:
            request_id = admitted.request_id
            if request_id in rows:
                raise BrokenInvariant("order", f"{request_id} is admitted but in the batch already")
            rows[request_id] = Row(admitted, self.identities[request_id], self._kinds)
        self._num_drafts_of = []
        self._readers.clear()
        self._writers.clear()
        sampled = list(
            map(
                self._run_row,
                plan.request_ids,
                plan.num_computed_tokens,
                plan.num_tokens,
                plan.new_block_ids,
                plan.draft_token_ids,
                plan.samples,
            )
        )
        self._check_common(plan)
        drafts: Mapping[str, list[int]] = {}
        if self._num_drafts and not self._proposes_at_launch:
            drafts = {request_id: self._propose(rows[request_id]) for request_id in plan.request_ids}
        result = StepResult(plan.step_number, sampled, {} if self._overlaps else dict(drafts))
        if self._proposes_at_launch:
            result.num_drafts = self._num_drafts_of
        if self._broken_row_share and self._rng.random() < self._broken_row_share:
            result.non_finite.append(self._rng.randrange(len(sampled)))
        return result

    def receive(
        self, token_ids: Sequence[int], num_tokens: int, tables: Sequence[BlockTable], identity: Identity
    ) -> None:
        """Write KV that comes from elsewhere, of a request's first tokens, into blocks reserved for it."""
        digests: list[int] = []
        identity.extend(digests, token_ids[:num_tokens])
        for group, table in enumerate(tables):
            kind = self._kinds[group]
            block_size, contents = kind.block_size, digests
            if isinstance(kind, CrossAttention):
                contents = identity.encoder_digests()
            # What was taken over from the prefix cache is there already.
            for index in range(table.num_registered, -(-len(contents) // block_size)):
                block_id = table.block_ids[index]
                if block_id:
                    content = contents[index * block_size : (index + 1) * block_size]
                    self._memories[group][block_id] = tuple(content)
                    self._wipe(group, block_id)

    def _run_row(
        self,
        request_id: str,
        computed: int,
        num_tokens: int,
        new_block_ids: list[list[int]],
        drafts: list[int],
        samples: bool,
    ) -> list[int]:
        row = self.rows[request_id]
        num_entries = list(map(len, row.tables))
        if new_block_ids:
            for table, block_ids in zip(row.tables, new_block_ids, strict=True):
                table += block_ids
        num_known = len(row.token_ids)
        start, end = computed, computed + num_tokens - len(drafts)
        self._check_room(row, computed + num_tokens, request_id)
        if samples:
            # Drafts of steps in flight count as accepted in a plan that was made before they were rejected.
            start -= end - num_known
            if start > computed or start < 0 or (start < computed and not self._overlaps):
                raise BrokenInvariant("order", f"{request_id} samples at {end} of {num_known} tokens")
            end = num_known
            if drafts and self._proposes_at_launch:
                # Fewer than planned, as a proposer may have fewer.
                drafts = self._propose(row)[: len(drafts)]
            elif drafts and self._overlaps:
                drafts = (row.proposal + [UNKNOWN_DRAFT] * len(drafts))[: len(drafts)]
        elif end >= num_known or drafts:
            raise BrokenInvariant("order", f"{request_id} computes {end} of {num_known} tokens, no sample")
        self._num_drafts_of.append(len(drafts))
        if drafts:
            digests, digest = row.digests.copy(), row.digests[-1]
            for draft in drafts:
                digest = link(digest, draft)
                digests.append(digest)
        else:
            digests = row.digests
        self._touch(row, start, end + len(drafts), digests, request_id)
        for group, kind in enumerate(self._kinds):
            if isinstance(kind, STATES):
                self._advance_state(row, group, num_entries[group], start, end, request_id)
        if not samples:
            return []
        sampled = self._verify(row, drafts)
        row.token_ids += sampled
        row.extend(self._kinds)
        return sampled

    def _check_common(self, plan: StepPlan) -> None:
        """The plan says with how many blocks all rows begin, in groups that read all tokens."""
        tables = [self.rows[request_id].tables for request_id in plan.request_ids]
        common = [
            num_equal(group) if isinstance(kind, FullAttention) and len(group) > 1 else 0
            for kind, group in zip(self._kinds, zip(*tables, strict=True), strict=True)
        ]
        if (plan.num_common_blocks or [0] * len(common)) != common:
            raise BrokenInvariant("budget", f"rows have {common} common blocks: {plan.num_common_blocks}")

    def _check_room(self, row: Row, end: int, request_id: str) -> None:
        num_positions = min(end + self._num_lookahead_tokens, self._max_model_len)
        for table, kind in zip(row.tables, self._kinds, strict=True):
            num_slots = row.identity.num_encoder_tokens if isinstance(kind, CrossAttention) else num_positions
            if len(table) * kind.block_size < num_slots:
                raise BrokenInvariant(
                    "kv-conservation", f"{request_id} has {len(table)} blocks for {num_slots}"
                )

    def _touch(self, row: Row, start: int, end: int, digests: list[int], request_id: str) -> None:
        """Read what the tokens from `start` on read of earlier ones, then write the slots up to `end`."""
        for group, kind in enumerate(self._kinds):
            block_size, table = kind.block_size, row.tables[group]
            memory, blocks = self._memories[group], row.blocks[group]
            if isinstance(kind, CrossAttention):
                self._touch_encoder(row, group, is_first=start == 0, request_id=request_id)
                continue
            if isinstance(kind, STATES):
                continue
            first = first_read(kind, start) // block_size
            last, rest = divmod(start, block_size)
            if first < last and list(map(memory.get, table[first:last])) != blocks[first:last]:
                self._report_mismatch(row, group, first, last, request_id)
            if (
                rest
                and first <= last
                and memory.get(table[last], ())[:rest] != tuple(digests[start - rest : start])
            ):
                self._report_mismatch(row, group, last, last + 1, request_id)
            index = last
            for place in range(start - rest, end, block_size):
                block_id = table[index]
                if not block_id:
                    raise BrokenInvariant("kv-conservation", f"{request_id} writes to the placeholder")
                memory[block_id] = tuple(digests[place : min(place + block_size, end)])
                if len(self._memories) > 1:
                    self._wipe(group, block_id)
                index += 1

    def _advance_state(
        self, row: Row, group: int, num_entries: int, start: int, end: int, request_id: str
    ) -> None:
        """Read the state before the tokens from `start` on; write those of ends of blocks that have one.

        num_entries: of the table before this step.
        """
        block_size, table, digests = self._kinds[group].block_size, row.tables[group], row.digests
        if start:
            current = table[num_entries - 1]
            if self._memories[group].get(current) != (digests[start - 1],):
                raise BrokenInvariant(
                    "isolation", f"{request_id} reads group {group}, state {current}: not that of its tokens"
                )
            self._readers.setdefault(current, set()).add(request_id)
        written = {end: table[-1]}
        # The state that the row has read is kept as well, unless the row goes on in its block.
        first = num_entries - 1 if start and table[num_entries - 1] != table[-1] else num_entries
        for index in range(first, len(table) - 1):
            if table[index] and start < (index + 1) * block_size:
                written[(index + 1) * block_size] = table[index]
        for num_tokens, block_id in written.items():
            if not block_id:
                raise BrokenInvariant("kv-conservation", f"{request_id} writes to the placeholder")
            self._memories[group][block_id] = (digests[num_tokens - 1],)
            self._wipe(group, block_id)
            self._writers[block_id] = request_id
        for block_id, readers in self._readers.items():
            writer = self._writers.get(block_id, "")
            if writer and readers - {writer}:
                raise BrokenInvariant(
                    "isolation", f"{min(readers - {writer})} reads state {block_id}, which {writer} writes"
                )

    def _touch_encoder(self, row: Row, group: int, *, is_first: bool, request_id: str) -> None:
        """The first step of a request writes all that cross-attention reads; every later one reads it."""
        memory, table, blocks = self._memories[group], row.tables[group], row.blocks[group]
        for block_id, content in zip(table, blocks, strict=True):
            if is_first:
                memory[block_id] = content
                self._wipe(group, block_id)
            elif memory.get(block_id) != content:
                raise BrokenInvariant("isolation", f"{request_id} reads what the encoder did not write")

    def _wipe(self, group: int, block_id: int) -> None:
        for other, memory in enumerate(self._memories):
            if other != group:
                memory.pop(block_id, None)

    def _report_mismatch(self, row: Row, group: int, first: int, last: int, request_id: str) -> None:
        memory, table = self._memories[group], row.tables[group]
        block_size = self._kinds[group].block_size
        for index in range(first, last):
            expected = tuple(row.digests[index * block_size : (index + 1) * block_size])
            if memory.get(table[index]) != expected:
                raise BrokenInvariant(
                    "isolation",
                    f"{request_id} reads group {group}, block {index} of its table, which is {table[index]}: "
                    "it does not hold the KV of its tokens",
                )

    def _verify(self, row: Row, drafts: Sequence[int]) -> list[int]:
        """Accept the drafts that are right, add the token that follows them."""
        digest = row.digests[-1]
        sampled = [next_token(digest)]
        if drafts:
            for draft in drafts:
                digest = link(digest, draft)
                sampled.append(next_token(digest))
            tokens = np.array(sampled)
            # Padding is like a token that no model has.
            known = (NUM_OUTPUT_TOKENS if draft == UNKNOWN_DRAFT else draft for draft in drafts)
            entries = DraftEntries(np.array([*known, -1]))
            sampled = tokens[entries.find_valid(tokens, np.ones(len(tokens), dtype=bool))].tolist()
        num_accepted = len(sampled) - 1
        self.num_padding_drafts += drafts.count(UNKNOWN_DRAFT)
        self.num_accepted_drafts += num_accepted
        self.num_rejected_drafts += len(drafts) - num_accepted
        return sampled

    def _propose(self, row: Row) -> list[int]:
        """Drafts that are right until the dice say otherwise."""
        random, proposal, digest = self._rng.random, [], row.digests[-1]
        num_drafts = int(random() * (self._num_drafts + 1)) or self._num_drafts
        for _ in repeat(None, num_drafts):
            draw = random()
            draft = next_token(digest) if draw < 0.7 else int(draw * 1000) % NUM_OUTPUT_TOKENS
            proposal.append(draft)
            digest = link(digest, draft)
        row.proposal = proposal
        return proposal
