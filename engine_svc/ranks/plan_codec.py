"""Encodes plans for the ranks: a request is described once, later steps take a few bytes per row.

Both sides keep the same table of handles. By default a row continues where its last one ended, computes one
token and samples; only deviations are encoded. Knows no channel and no tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_svc.core.byte_fields import FieldReader, FieldWriter, MessageError
from engine_svc.core.extras import NO_EXTRAS, ExtraCodec, Extras
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan

# First byte of a message to the ranks: its kind.
PLAN, CALL, STOP = b"P", b"C", b"S"
PREPARE, DROP = b"R", b"D"  # the second ends with the id of the request

VERSION = 5
MAX_ROWS = 1 << 16

# Version, step number, number of rows, of released, admitted and preempted requests.
_HEADER = struct.Struct("<BQIIII")
_TAG_AND_PROMPT = struct.Struct("<II")
_ONE = struct.Struct("<i")

# Bits of a row's word. The lower half is the handle.
_COMPUTED = 1 << 16  # number of computed tokens follows
_COUNT = 1 << 17  # number of tokens follows
_SILENT = 1 << 18  # does not sample
_BLOCKS = 1 << 19  # gained blocks follow, in any form
_DRAFTS = 1 << 20
_ONE_EACH = 1 << 21  # at most one block per group; bits from _FIRST_GROUP on are the groups
_FIRST_GROUP = 24
_MAX_GROUPS = 8
_HANDLE = MAX_ROWS - 1

_PREPARATION = struct.Struct("<QI")  # its number, and the weight of its account

# JSON has only lists. Parameters that may be None have None as default, so None is never encoded.
_FORMS: dict[str, Callable[[Any], object]] = {
    "stop_token_ids": frozenset,
    "logprob_token_ids": tuple,
    "repetition": lambda limits: RepetitionLimits(**limits),
}

_Ints = npt.NDArray[np.int64]


class PlanEncoder:
    """Encodes plans, each once and in order. num_groups: of layers that share block tables.

    extras: of the channel, for its other messages as well.
    """

    def __init__(self, *, max_num_seqs: int, num_groups: int, extras: ExtraCodec = NO_EXTRAS) -> None:
        self._rows = _Rows(max_num_seqs)
        self._num_groups = num_groups
        self._extras = extras

    def encode(self, plan: StepPlan) -> bytes:
        """The plan as bytes. Raises UnknownExtra for an extra that no rank knows; nothing changes."""
        self._extras.check(plan.extras)
        for admitted in plan.admitted:
            self._extras.check(admitted.extras)
        writer = FieldWriter()
        writer.fixed(
            _HEADER,
            VERSION,
            plan.step_number,
            len(plan.request_ids),
            len(plan.released),
            len(plan.admitted),
            len(plan.preempted),
        )
        writer.ints([self._rows.leave(request_id) for request_id in plan.released])
        self._write_preempted(writer, plan)
        writer.counted_ints(plan.num_common_blocks)
        for admitted in plan.admitted:
            self._write_admitted(writer, admitted)
        if plan.request_ids:
            self._write_rows(writer, plan)
        self._extras.write(writer, plan.extras)
        return writer.message()

    def _write_preempted(self, writer: FieldWriter, plan: StepPlan) -> None:
        index_of = {request_id: index for index, request_id in enumerate(plan.released)}
        writer.ints([index_of.get(request_id, -1) for request_id in plan.preempted])
        for request_id in plan.preempted:
            if request_id not in index_of:
                writer.text(request_id)

    def _write_admitted(self, writer: FieldWriter, admitted: AdmittedRequest) -> None:
        self._rows.enter(admitted.request_id)
        writer.text(admitted.request_id)
        writer.fixed(_TAG_AND_PROMPT, len(admitted.block_ids), admitted.num_prompt_tokens)
        writer.counted_ints(admitted.token_ids)
        for block_ids in admitted.block_ids:
            writer.counted_ints(block_ids)
        writer.text(sampling_text(admitted.sampling))
        writer.text(admitted.cache_salt)
        self._extras.write(writer, admitted.extras)

    def _write_rows(self, writer: FieldWriter, plan: StepPlan) -> None:
        rows = self._rows
        handles: _Ints = np.array([rows.handle_of[request_id] for request_id in plan.request_ids])
        computed = np.array(plan.num_computed_tokens, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        moved, counted = computed != rows.next_computed[handles], counts != 1
        rows.next_computed[handles] = computed + counts
        words = handles | moved * _COMPUTED | counted * _COUNT
        words |= ~np.array(plan.samples, dtype=bool) * _SILENT
        singles: list[int] = []
        gains: list[list[list[int]]] = []
        for row, gained in enumerate(plan.new_block_ids):
            if gained:
                words[row] |= self._blocks_word(gained, singles, gains)
        drafting = [row for row, drafts in enumerate(plan.draft_token_ids) if drafts]
        words[drafting] |= _DRAFTS
        writer.ints(words.astype(np.uint32).view(np.int32))
        writer.ints(computed[moved])
        writer.ints(counts[counted])
        writer.ints(singles)
        for gained in gains:
            writer.fixed(_ONE, len(gained))
            for block_ids in gained:
                writer.counted_ints(block_ids)
        for row in drafting:
            writer.counted_ints(plan.draft_token_ids[row])

    def _blocks_word(self, gained: list[list[int]], singles: list[int], gains: list[list[list[int]]]) -> int:
        """The bits for the blocks that a row gains; the blocks are appended to `singles` or `gains`."""
        if len(gained) != self._num_groups or len(gained) > _MAX_GROUPS or max(map(len, gained)) > 1:
            gains.append(gained)
            return _BLOCKS
        word = _ONE_EACH
        for group, block_ids in enumerate(gained):
            if block_ids:
                singles.append(block_ids[0])
                word |= 1 << (_FIRST_GROUP + group)
        return word


class PlanDecoder:
    """Decodes plans: every message of one encoder, in order."""

    def __init__(self, *, max_num_seqs: int, num_groups: int, extras: ExtraCodec = NO_EXTRAS) -> None:
        self._rows = _Rows(max_num_seqs)
        self._num_groups = num_groups
        self._extras = extras

    def rows(self) -> dict[str, tuple[int, int]]:
        """The handle and the number of computed tokens of each request in the batch."""
        return {
            request_id: (handle, int(self._rows.next_computed[handle]))
            for request_id, handle in self._rows.handle_of.items()
        }

    def decode(self, message: bytes) -> StepPlan:
        """The plan that was encoded. Raises MessageError for bytes of another version or form."""
        reader = FieldReader(message)
        version, step_number, num_rows, num_released, num_admitted, num_preempted = reader.fixed(_HEADER)
        if version != VERSION:
            raise MessageError(f"a plan has version {version}, this rank reads {VERSION}")
        plan = StepPlan(step_number)
        for handle in reader.ints(num_released).tolist():
            request_id = self._rows.id_of[handle]
            self._rows.leave(request_id)
            plan.released.append(request_id)
        indices = reader.ints(num_preempted).tolist()
        plan.preempted = [plan.released[index] if index >= 0 else reader.text() for index in indices]
        plan.num_common_blocks = reader.counted_ints()
        plan.admitted = [self._read_admitted(reader) for _ in range(num_admitted)]
        if num_rows:
            self._read_rows(reader, plan, num_rows)
        plan.extras = self._extras.read(reader)
        reader.finish()
        return plan

    def _read_admitted(self, reader: FieldReader) -> AdmittedRequest:
        request_id = reader.text()
        self._rows.enter(request_id)
        num_groups, num_prompt_tokens = reader.fixed(_TAG_AND_PROMPT)
        token_ids = reader.counted_ints()
        block_ids = [reader.counted_ints() for _ in range(num_groups)]
        sampling, cache_salt = sampling_from(reader.text()), reader.text()
        extras = self._extras.read(reader)
        return AdmittedRequest(
            request_id, token_ids, num_prompt_tokens, sampling, block_ids, extras, cache_salt
        )

    def _read_rows(self, reader: FieldReader, plan: StepPlan, num_rows: int) -> None:
        rows = self._rows
        words = reader.ints(num_rows).view(np.uint32).astype(np.int64)
        handles = words & _HANDLE
        computed, counts = rows.next_computed[handles], np.ones(num_rows, dtype=np.int64)
        moved, counted = words & _COMPUTED != 0, words & _COUNT != 0
        computed[moved] = reader.ints(int(moved.sum()))
        counts[counted] = reader.ints(int(counted.sum()))
        rows.next_computed[handles] = computed + counts
        plan.request_ids = [rows.id_of[handle] for handle in handles.tolist()]
        plan.num_computed_tokens, plan.num_tokens = computed.tolist(), counts.tolist()
        plan.samples = (words & _SILENT == 0).tolist()
        plan.new_block_ids = [[] for _ in range(num_rows)]
        self._read_singles(reader, plan, words)
        for row in (words & _BLOCKS).nonzero()[0].tolist():
            (num_groups,) = reader.fixed(_ONE)
            plan.new_block_ids[row] = [reader.counted_ints() for _ in range(num_groups)]
        plan.draft_token_ids = [[] for _ in range(num_rows)]
        for row in (words & _DRAFTS).nonzero()[0].tolist():
            plan.draft_token_ids[row] = reader.counted_ints()

    def _read_singles(self, reader: FieldReader, plan: StepPlan, words: _Ints) -> None:
        gaining = (words & _ONE_EACH).nonzero()[0]
        has_gained = (words[gaining, None] >> _FIRST_GROUP >> np.arange(self._num_groups)) & 1
        block_ids = iter(reader.ints(int(has_gained.sum())).tolist())
        for row, gains in zip(gaining.tolist(), has_gained.tolist(), strict=True):
            plan.new_block_ids[row] = [[next(block_ids)] if gains_one else [] for gains_one in gains]


class _Rows:
    """The table of handles. Free handles are reused in LIFO order, so both sides choose the same."""

    def __init__(self, max_num_seqs: int) -> None:
        if not 1 <= max_num_seqs <= MAX_ROWS:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, handles are made for 1 to {MAX_ROWS}")
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self.handle_of: dict[str, int] = {}
        self.id_of = [""] * max_num_seqs
        self.next_computed = np.zeros(max_num_seqs, dtype=np.int64)

    def enter(self, request_id: str) -> None:
        handle = self.handle_of[request_id] = self._free.pop()
        self.id_of[handle] = request_id
        self.next_computed[handle] = 0

    def leave(self, request_id: str) -> int:
        handle = self.handle_of.pop(request_id)
        self._free.append(handle)
        return handle


def encode_preparation(
    number: int, request_id: str, extras: Extras, account: str, weight: int, codec: ExtraCodec
) -> bytes:
    """A preparation as bytes. Raises UnknownExtra for an extra that no rank knows."""
    codec.check(extras)
    writer = FieldWriter()
    writer.fixed(_PREPARATION, number, weight)
    writer.text(request_id)
    writer.text(account)
    codec.write(writer, extras)
    return writer.message()


def decode_preparation(message: bytes, codec: ExtraCodec) -> tuple[int, str, Extras, str, int]:
    """The arguments of `Preparer.prepare`. Raises MessageError."""
    reader = FieldReader(message)
    number, weight = reader.fixed(_PREPARATION)
    request_id, account, extras = reader.text(), reader.text(), codec.read(reader)
    reader.finish()
    return number, request_id, extras, account, weight


def sampling_text(sampling: SamplingParams) -> str:
    """The parameters that differ from their defaults, as JSON."""
    values, defaults = asdict(sampling), asdict(SamplingParams(sampling.max_tokens))
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    return json.dumps({"max_tokens": sampling.max_tokens, **changed}, separators=(",", ":"), default=sorted)


def sampling_from(text: str) -> SamplingParams:
    """The inverse of `sampling_text`."""
    values: dict[str, Any] = json.loads(text)
    for name in values.keys() & _FORMS.keys():
        values[name] = _FORMS[name](values[name])
    return SamplingParams(**values)
