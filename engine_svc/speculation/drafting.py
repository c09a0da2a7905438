"""Rows with drafts: how far their tokens are known, and what is proposed to follow. Knows no proposer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.model.context import HiddenStates
from engine_svc.runner.input_batch import InputBatch, StepInputs
from engine_svc.runner.running_step import RunningStep
from engine_svc.runner.sampling.transfer import Ints, to_device
from engine_svc.runner.step_drafts import StepDrafts
from engine_svc.speculation.proposer import Draw, IntArray, Proposer


class Drafting(StepDrafts):
    """Replaces what a plan does not know yet: its drafts, and where rows begin if earlier ones were rejected.

    A plan is made as if every draft before it were accepted. Where rows begin follows from how many of their
    tokens are known, so all ranks agree. Once the results of all steps with drafts were known to the
    scheduler, plans are taken as they are. On a GPU a step with drafts, and the one after it, wait for the
    tokens of the step before; all steps do where hidden states are read.
    """

    def __init__(self, proposer: Proposer, max_steps_in_flight: int, batch: InputBatch, draw: Draw) -> None:
        self.costs_time = proposer.has_network
        self._proposer = proposer
        self._max_steps_in_flight = max_steps_in_flight
        self._batch = batch
        self._draw = draw
        self._is_on_host = batch.device.type == "cpu"
        self._token_ids: IntArray = (
            batch.token_ids.numpy() if self._is_on_host else np.zeros(batch.token_ids.shape, dtype=np.int32)
        )
        self._num_known: Ints = np.zeros(len(self._token_ids), dtype=np.int64)
        self._num_plain_steps = max_steps_in_flight  # without drafts, since the last with any
        # On a GPU `read` waits for tokens between two launches, and a network observes every step.
        self._may_idle = self.is_idle = self._is_on_host and not proposer.has_network
        # Of steps whose tokens were not noted: the rows and positions that sample, and the step where its
        # tokens have to be read. A plain step on a CPU is not held, as memory is faster when used again.
        self._unread: deque[tuple[Ints, Ints, RunningStep | None]] = deque()

    def wanted_hidden(self) -> HiddenStates | None:
        layers = self._proposer.hidden_layers
        return None if layers is None else HiddenStates(layers)

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._num_known[row] = len(admitted.token_ids)
        if not self._is_on_host:
            self._token_ids[row, : len(admitted.token_ids)] = admitted.token_ids
        self._proposer.add_row(row, admitted)

    def remove_row(self, row: int) -> None:
        self._proposer.remove_row(row, self._known(row))

    def read(self, plan: StepPlan, *, has_drafts: bool) -> None:
        unread = self._unread
        needs_newest = (
            has_drafts
            or self._num_plain_steps + 1 < self._max_steps_in_flight
            or plan.released
            or self._proposer.hidden_layers is not None
        )
        while len(unread) > (0 if needs_newest else 1):
            self._note_sampled(*unread.popleft())

    def settle(self, plan: StepPlan, *, has_drafts: bool) -> StepPlan:
        self._num_plain_steps = 0 if has_drafts else self._num_plain_steps + 1
        self.is_idle = self._may_idle and self._num_plain_steps + 1 >= self._max_steps_in_flight
        if self._num_plain_steps >= self._max_steps_in_flight:
            return plan
        rows = [self._batch.row_of[request_id] for request_id in plan.request_ids]
        starts = np.minimum(plan.num_computed_tokens, self._num_known[rows] - 1).tolist()
        if not has_drafts:
            return replace(plan, num_computed_tokens=starts)
        limits = [len(planned) for planned in plan.draft_token_ids]
        proposed = self._propose(rows, limits)
        num_tokens = [
            num - limit + len(drafts)
            for num, limit, drafts in zip(plan.num_tokens, limits, proposed, strict=True)
        ]
        settled = replace(plan, num_computed_tokens=starts, num_tokens=num_tokens, draft_token_ids=proposed)
        self._put(rows, proposed)
        return settled

    def observe(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        lengths = self._num_known[inputs.rows]
        self._proposer.observe(
            self._token_ids, inputs.rows, inputs.starts, inputs.counts, lengths, hidden.joined()
        )

    def keep(self, inputs: StepInputs, step: RunningStep) -> None:
        unread, rows = self._unread, inputs.sampling_rows
        # A CPU's tokens are in the rows already. Of steps with the same rows the newest tells how many.
        is_read = self._is_on_host and inputs.drafts is None
        kept = (rows, inputs.sampling_positions, None if is_read else step)
        if self._is_on_host and unread and unread[-1][0] is rows:
            unread[-1] = kept
            return
        unread.append(kept)
        while self.is_idle and len(unread) > 1:
            self._note_sampled(*unread.popleft())

    def rehearse(self, num_rows: int) -> None:
        self._proposer.rehearse(num_rows)

    def release_cache(self) -> None:
        self._proposer.release_cache()

    def allocate_cache(self) -> None:
        self._proposer.allocate_cache()

    def _note_sampled(self, rows: Ints, positions: Ints, step: RunningStep | None) -> None:
        if step is not None:
            token_ids = step.sampled_ids()
            is_valid = token_ids >= 0
            rows, positions = rows[is_valid], positions[is_valid]
            if not self._is_on_host:
                self._token_ids[rows, positions] = token_ids[is_valid]
        # In ascending order of positions, so the last of a row stays.
        self._num_known[rows] = positions + 1

    def _propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """Drafts of each row, at most as many as its limit."""
        proposed: list[list[int]] = [[] for _ in rows]
        drafting = [index for index, limit in enumerate(limits) if limit]
        batch_rows = np.array([rows[index] for index in drafting], dtype=np.int64)
        batch_limits = np.array([limits[index] for index in drafting], dtype=np.int64)
        proposals = self._proposer.propose(
            self._token_ids, batch_rows, self._num_known[batch_rows], batch_limits, self._draw
        )
        for index, drafts in zip(drafting, proposals, strict=True):
            proposed[index] = list(drafts)
        return proposed

    def _known(self, row: int) -> IntArray:
        return self._token_ids[row, : self._num_known[row]]

    def _put(self, rows: Sequence[int], proposed: Sequence[Sequence[int]]) -> None:
        """Write drafts behind the rows' known tokens."""
        flat = np.array([draft for drafts in proposed for draft in drafts], dtype=np.int64)
        if len(flat):
            counts = np.fromiter(map(len, proposed), np.int64, len(rows))
            of_rows = np.repeat(rows, counts)
            offsets = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = self._num_known[of_rows] + offsets
            self._batch.append(of_rows, positions, to_device(flat, self._batch.device))
