"""Rows of the batch: which requests are in, and a step's inputs made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.runner.input_batch import InputBatch
from tests.engine_svc.runner.fakes import apply


def small_batch(**sizes: int) -> InputBatch:
    defaults = {"max_num_seqs": 3, "max_model_len": 32, "block_size": 4}
    return InputBatch(**{**defaults, **sizes})


def admitted(
    request_id: str, num_tokens: int, block_ids: Sequence[int] = (), **options: object
) -> AdmittedRequest:
    """A request that enters, with the blocks it has already."""
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **options})
    tokens = list(range(10, 10 + num_tokens))
    return AdmittedRequest(request_id, tokens, num_tokens, sampling, [list(block_ids)])


def plan(rows: list[tuple[str, int, int, list[int]]], **columns: object) -> StepPlan:
    """Rows as (request id, tokens to compute, tokens computed, new block ids)."""
    return StepPlan(
        0,
        request_ids=[row[0] for row in rows],
        num_tokens=[row[1] for row in rows],
        num_computed_tokens=[row[2] for row in rows],
        new_block_ids=[[row[3]] if row[3] else [] for row in rows],
        draft_token_ids=[[] for _ in rows],
        **{"samples": [True for _ in rows], **columns},
    )


def test_tokens_of_all_rows_lie_flat_with_their_positions_and_slots():
    batch = small_batch()
    step = plan(
        [("a", 3, 0, [7, 2]), ("b", 2, 4, [5, 1])],
        admitted=[admitted("a", 6), admitted("b", 6)],
        samples=[False, True],
    )
    apply(batch, step)
    inputs = batch.gather(step)
    assert inputs.token_ids.tolist() == [10, 11, 12, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 4, 5]
    assert inputs.slot_mappings[0].tolist() == [28, 29, 30, 4, 5]
    assert inputs.logit_rows.tolist() == [4]
    assert inputs.attention[0].query_lengths.tolist() == [3, 2]
    assert inputs.attention[0].total_lengths.tolist() == [3, 6]
    assert inputs.attention[0].block_tables.tolist() == [[7, 2], [5, 1]]


def test_blocks_that_hold_computed_tokens_are_not_fresh():
    batch = small_batch()
    step = plan(
        [("a", 2, 8, [2]), ("b", 5, 0, [6, 7])], admitted=[admitted("a", 10, [3, 1]), admitted("b", 5)]
    )
    assert apply(batch, step) == [2, 6, 7]
    assert apply(batch, plan([("a", 1, 10, []), ("b", 1, 5, [])])) == []
    assert apply(batch, plan([("b", 1, 8, [9])])) == [9]


def test_appended_tokens_are_the_next_steps_input():
    batch = small_batch()
    apply(batch, plan([("a", 4, 0, [0])], admitted=[admitted("a", 4)]))
    step = plan([("a", 4, 0, [])])
    inputs = batch.gather(step)
    assert inputs.sampling_positions.tolist() == [4]
    batch.append(inputs.sampling_rows, inputs.sampling_positions, torch.tensor([44]))
    later = plan([("a", 1, 4, [8])])
    apply(batch, later)
    assert batch.gather(later).token_ids.tolist() == [44]


def test_a_released_row_is_entered_by_the_next_request_without_what_was_in_it():
    batch = small_batch(max_num_seqs=1)
    apply(batch, plan([("a", 8, 0, [0, 1])], admitted=[admitted("a", 8)]))
    step = plan([("b", 2, 0, [6])], released=["a"], admitted=[admitted("b", 2)])
    assert batch.release(step.released) == [0]
    assert batch.enter(step.admitted[0]) == 0
    assert batch.extend(step) == [6]
    assert batch.gather(step).slot_mappings[0].tolist() == [24, 25]
    assert batch.table(0, 0) == [6]


def test_every_group_of_layers_has_block_tables_of_its_own():
    batch = small_batch(num_groups=2)
    step = plan([("a", 5, 0, [])], admitted=[admitted("a", 5)])
    step.new_block_ids = [[[7, 2], [3, 5]]]
    step.admitted[0].block_ids = [[], []]
    assert apply(batch, step) == [7, 2, 3, 5]
    inputs = batch.gather(step)
    assert [slots.tolist() for slots in inputs.slot_mappings] == [[28, 29, 30, 31, 8], [12, 13, 14, 15, 20]]
    assert [each.block_tables.tolist() for each in inputs.attention] == [[[7, 2]], [[3, 5]]]


def test_a_request_may_leave_and_return_in_one_plan():
    batch = small_batch(max_num_seqs=1)
    apply(batch, plan([("a", 2, 0, [0])], admitted=[admitted("a", 2)]))
    step = plan([("a", 3, 0, [5])], released=["a"], admitted=[admitted("a", 3)])
    assert apply(batch, step) == [5]
    assert batch.gather(step).slot_mappings[0].tolist() == [20, 21, 22]


def test_block_tables_are_gathered_anew_only_when_a_row_or_the_width_changes():
    batch = small_batch()
    rows = [("a", 1, 4, [7, 2]), ("b", 1, 1, [5])]
    first = plan(rows, admitted=[admitted("a", 5), admitted("b", 2), admitted("c", 2, [9])])
    apply(batch, first)
    tables = batch.gather(first).attention[0].block_tables
    assert tables.tolist() == [[7, 2], [5, 0]]
    same = plan([("a", 1, 5, []), ("b", 1, 2, [])])
    apply(batch, same)
    assert batch.gather(same).attention[0].block_tables is tables
    grown = plan([("a", 1, 6, []), ("b", 1, 3, [3])])
    apply(batch, grown)
    assert batch.gather(grown).attention[0].block_tables.tolist() == [[7, 2], [5, 3]]
    shorter = plan([("b", 1, 3, []), ("c", 1, 2, [])])
    assert batch.gather(shorter).attention[0].block_tables.tolist() == [[5], [9]]
    wider = plan([("b", 1, 4, []), ("c", 1, 3, [])])
    assert batch.gather(wider).attention[0].block_tables.tolist() == [[5, 3], [9, 0]]


def test_without_groups_rows_have_lengths_and_no_blocks():
    batch = small_batch(num_groups=0)
    requests = [replace(admitted(name, count), block_ids=[]) for name, count in (("a", 3), ("b", 2))]
    step = plan([("a", 3, 0, []), ("b", 2, 0, [])], admitted=requests, samples=[False, False])
    apply(batch, step)
    inputs = batch.gather(step)
    (lengths,) = inputs.attention
    assert (inputs.slot_mappings, lengths.block_tables.shape) == ([], (2, 0))
    assert lengths.query_starts.tolist() == [0, 3, 5]


def test_attention_learns_with_how_many_blocks_the_rows_of_each_group_begin():
    batch = small_batch(num_groups=2)
    entering = [
        AdmittedRequest(name, list(range(9)), 9, SamplingParams(8), [[5, 6, own], [0, own, own]])
        for name, own in (("a", 1), ("b", 2))
    ]
    step = replace(plan([("a", 1, 8, []), ("b", 1, 8, [])], admitted=entering), num_common_blocks=[2, 0])
    apply(batch, step)
    assert [attention.num_common_blocks for attention in batch.gather(step).attention] == [2, 0]
    later = plan([("a", 1, 9, [])])
    assert [attention.num_common_blocks for attention in batch.gather(later).attention] == [0, 0]
