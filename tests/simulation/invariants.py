"""What must hold of scheduler and cache after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID, BlockPool
from engine_svc.request import Request, RequestStatus
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.step import StepPlan


def check_blocks(pool: BlockPool, requests: Iterable[Request]) -> None:
    """No block is lost or held twice over; the free list is exactly what nobody holds."""
    requests = list(requests)
    holders = Counter(block_id for request in requests for block_id in request.block_table)
    block_ids = range(PLACEHOLDER_BLOCK_ID + 1, pool.num_usable_blocks + 1)
    assert PLACEHOLDER_BLOCK_ID not in holders
    assert {block_id: pool.ref_count(block_id) for block_id in block_ids} == {
        block_id: holders[block_id] for block_id in block_ids
    }
    assert sorted(pool.free_block_ids) == [block_id for block_id in block_ids if not holders[block_id]]
    for request in requests:
        assert len(set(request.block_table)) == len(request.block_table)
        if request.status is not RequestStatus.RUNNING:
            assert request.block_table == []


def check_hashes(pool: BlockPool, requests: Iterable[Request]) -> None:
    """The registered blocks of a request can be found by the hashes of its tokens, and no others of it."""
    for request in requests:
        hashes = [pool.block_hash(block_id) for block_id in request.block_table]
        num_registered = request.num_registered_blocks
        assert hashes[:num_registered] == request.block_hashes[:num_registered]
        assert not any(hashes[num_registered:])


def check_queues(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Every unfinished request is in exactly one queue, by its status."""
    requests = list(requests)
    running = {request.request_id for request in requests if request.status is RequestStatus.RUNNING}
    assert Counter(scheduler.running_ids) == Counter(running)
    assert Counter(scheduler.waiting_ids) == Counter({request.request_id for request in requests} - running)
    stats = scheduler.stats()
    waiting = [request for request in requests if request.request_id not in running]
    assert stats.num_waiting_tokens == sum(request.num_uncached_tokens for request in waiting)
    assert scheduler.num_unfinished == len(requests)


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """A plan keeps to the limits, and its columns to each other."""
    assert plan.total_num_tokens <= config.max_num_batched_tokens
    assert len(plan.request_ids) <= config.max_num_seqs
    assert all(num_tokens > 0 for num_tokens in plan.num_tokens)
    num_rows = len(plan.request_ids)
    columns = (
        plan.num_tokens,
        plan.num_computed_tokens,
        plan.new_block_ids,
        plan.draft_token_ids,
        plan.samples,
    )
    assert [len(column) for column in columns] == [num_rows] * len(columns)
    assert not (plan.preempted and plan.admitted), "a step that preempts admits nobody"
    num_admitted = len(plan.admitted)
    admitted_ids = [admitted.request_id for admitted in plan.admitted]
    assert plan.request_ids[num_rows - num_admitted :] == admitted_ids, "running rows come first"


class TableWatch:
    """Sees that block tables only grow while a request runs."""

    def __init__(self) -> None:
        self._tables: dict[Request, tuple[int, list[int]]] = {}

    def check(self, requests: Iterable[Request]) -> None:
        """Compare with the tables of the last call."""
        tables = {request: (request.num_preemptions, list(request.block_table)) for request in requests}
        for request, (num_preemptions, table) in self._tables.items():
            stay, now = tables.get(request, (-1, []))
            if stay == num_preemptions:
                assert now[: len(table)] == table, f"the table of {request.request_id} changed"
        self._tables = tables
