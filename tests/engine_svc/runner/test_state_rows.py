"""The slots that rows read and write, by what plans say of their tables of states."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_svc.cache.attention import FullAttention, KeptState
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.runner.state_rows import NO_SLOT, StateRows

FIRST_ID = 100


def rows_of(*tables: list[int]) -> StateRows:
    """Rows that have entered with these tables, of blocks of 4 tokens."""
    rows = StateRows(max_num_seqs=8, block_size=4, first_id=FIRST_ID)
    for row, block_ids in enumerate(tables):
        rows.enter(row, block_ids)
    return rows


def slots(rows: StateRows, starts: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    indices = np.arange(len(starts))
    gathered = rows.gather(indices, np.array(starts), np.cumsum(counts))
    return gathered.read.tolist(), gathered.write.tolist()


def test_a_prompt_begins_with_zeros_and_leaves_kept_states_on_its_way():
    rows = rows_of([])
    rows.extend(0, [0, 107, 0, 103], 0)
    assert slots(rows, [0], [15]) == ([NO_SLOT], [*[NO_SLOT] * 7, 7, *[NO_SLOT] * 6, 3])


def test_a_row_goes_on_in_its_slot():
    rows = rows_of([0, 105], [102])
    assert slots(rows, [6, 1], [1, 2]) == ([5, 2], [5, NO_SLOT, 2])


def test_after_a_whole_block_a_row_reads_one_slot_and_writes_the_next():
    rows = rows_of([0, 105])
    rows.extend(0, [106], 8)
    assert slots(rows, [8], [1]) == ([5], [6])
    rows.begin_step()
    assert slots(rows, [9], [1]) == ([6], [6])


def test_a_state_in_the_middle_of_a_block_is_kept_at_its_end():
    rows = rows_of([0, 105])
    rows.extend(0, [0, 106], 6)
    assert slots(rows, [6], [8]) == ([5], [NO_SLOT, 5, *[NO_SLOT] * 5, 6])


def test_a_row_that_gains_its_own_slot_again_writes_nothing_before_its_end():
    rows = rows_of([0, 105])
    rows.extend(0, [0, 105], 6)
    assert slots(rows, [6], [8]) == ([5], [*[NO_SLOT] * 7, 5])


def test_a_row_that_is_used_again_begins_anew():
    rows = rows_of([0, 105])
    rows.enter(0, [])
    rows.extend(0, [104], 0)
    assert slots(rows, [0], [2]) == ([NO_SLOT], [NO_SLOT, 4])


@pytest.mark.parametrize("seed", range(8))
def test_every_state_is_that_after_its_tokens(seed: int):
    rng = random.Random(seed)
    config = CacheConfig(FIRST_ID, (FullAttention(4), KeptState(4, 12)), num_state_slots=rng.choice((5, 9)))
    cache = KVCache(config, max_model_len=200, max_in_flight_tokens=200)
    rows = StateRows(max_num_seqs=4, block_size=4, first_id=FIRST_ID)
    # The number of tokens, all of them equal, of which a slot has the state.
    states: dict[int, int] = {NO_SLOT: 0}
    running: dict[int, Request] = {}
    num_hits = 0
    for _ in range(900):
        rows.begin_step()
        if len(running) < 4:
            row = min(set(range(4)) - set(running))
            request = Request(str(row), [1] * rng.randint(1, 60), 1, SamplingParams(max_tokens=60))
            request.num_prompt_tokens = request.num_tokens
            hit = cache.match_prefix(request)
            if (new := cache.admit(request, hit, 1, reserve_all=False)) is not None:
                num_hits += hit.num_tokens > 0
                running[row] = request
                table = request.block_tables[1].block_ids
                rows.enter(row, table[: len(table) - len(new[1])])
                rows.extend(row, new[1], request.num_computed_tokens)
                _check(rows, {row: (request.num_computed_tokens, 1)}, states)
                request.num_computed_tokens += 1
                request.move_to(RequestStatus.WAITING)
                request.move_to(RequestStatus.RUNNING)
                cache.take_registered()
            continue
        row = rng.choice(list(running))
        request = running[row]
        num_tokens = min(rng.choice((1, 1, 3, 20)), request.num_tokens + 8 - request.num_computed_tokens)
        request.token_ids += [1] * max(0, request.num_computed_tokens + num_tokens - request.num_tokens)
        if request.num_computed_tokens > 50 or (new := cache.grow(request, num_tokens)) is None:
            cache.release(running.pop(row))
            continue
        if new and new[1]:
            rows.extend(row, new[1], request.num_computed_tokens)
        _check(rows, {row: (request.num_computed_tokens, num_tokens)}, states)
        request.num_computed_tokens += num_tokens
        cache.take_registered()
    assert num_hits > 0


def _check(rows: StateRows, step: dict[int, tuple[int, int]], states: dict[int, int]) -> None:
    """Run a step of one row: it reads the state after its tokens, and leaves others."""
    ((row, (start, count)),) = step.items()
    gathered = rows.gather(np.array([row]), np.array([start]), np.array([count]))
    assert states[gathered.read.tolist()[0]] == start
    for index, slot in enumerate(gathered.write.tolist()):
        if slot != NO_SLOT:
            states[slot] = start + index + 1
    assert gathered.write.tolist()[-1] != NO_SLOT
