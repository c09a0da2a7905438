"""What must hold of scheduler and cache, by the names of the list of invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine_svc.cache.attention import AttentionKind, KeptState
from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID, BlockPool, JoinedPools, content_key
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.scheduler import Scheduler
from tests.engine_svc.core_state import content_of, free_block_ids, num_unfinished
from tests.simulation.broken import BrokenInvariant, expect
from tests.simulation.cache_watch import CacheWatch
from tests.simulation.paged_runner import STATES, Row, first_read

_HASH_BYTES = 32


def check_plan(
    plan: StepPlan,
    config: SchedulerConfig,
    pause: PauseState,
    pool: BlockPool | JoinedPools,
    kinds: Sequence[AttentionKind] = (),
    *,
    displaces: bool = False,
) -> None:
    """budget: a plan keeps to the limits, its columns fit each other, and no block is given twice.

    displaces: whether the policy preempts requests for others that are admitted.
    """
    num_rows = len(plan.request_ids)
    if sum(plan.num_tokens) > config.max_num_batched_tokens or num_rows > config.max_num_seqs:
        raise BrokenInvariant("budget", f"{num_rows} rows with {sum(plan.num_tokens)} tokens")
    if num_rows and min(plan.num_tokens) < 1:
        raise BrokenInvariant("budget", f"rows have {plan.num_tokens} tokens")
    lengths = {
        len(plan.num_tokens),
        len(plan.num_computed_tokens),
        len(plan.new_block_ids),
        len(plan.draft_token_ids),
        len(plan.samples),
        len(set(plan.request_ids)),
    }
    if lengths != {num_rows}:
        raise BrokenInvariant("budget", f"columns of {num_rows} rows have lengths {lengths}")
    if plan.admitted:
        admitted_ids = [admitted.request_id for admitted in plan.admitted]
        gave_way = set(plan.preempted).intersection(admitted_ids) if displaces else plan.preempted
        if gave_way or pause is not PauseState.NONE:
            raise BrokenInvariant("order", f"{admitted_ids} admitted, {plan.preempted} preempted, {pause}")
        if plan.request_ids[num_rows - len(admitted_ids) :] != admitted_ids:
            raise BrokenInvariant("order", "running rows do not come before admitted ones")
    if num_rows and pause is PauseState.ALL:
        raise BrokenInvariant("order", "a plan has rows though all is paused")
    given: set[int] = set()
    for new_block_ids in plan.new_block_ids:
        for group, block_ids in enumerate(new_block_ids):
            for block_id in block_ids:
                if block_id == PLACEHOLDER_BLOCK_ID and kinds and isinstance(kinds[group], STATES):
                    continue
                if block_id in given or block_id == PLACEHOLDER_BLOCK_ID or not pool.ref_count(block_id):
                    raise BrokenInvariant("budget", f"block {block_id} is assigned twice or not held at all")
                given.add(block_id)


def check_content(
    block_hashes: Sequence[bytes],
    digests: Sequence[int],
    block_size: int,
    hash_of: dict[int, bytes],
    digest_of: dict[bytes, int],
) -> None:
    """hash-soundness: equal hash, equal content from the first token on, and the other way round."""
    for block_hash, digest in zip(block_hashes, digests[block_size - 1 :: block_size], strict=False):
        if hash_of.setdefault(digest, block_hash) != block_hash:
            raise BrokenInvariant("hash-soundness", "the same content has two hashes")
        if digest_of.setdefault(block_hash, digest) != digest:
            raise BrokenInvariant("hash-soundness", "two contents have the same hash")


def check_whole_state(
    scheduler: Scheduler,
    kv_cache: KVCache,
    config: CacheConfig,
    requests: Sequence[Request],
    *,
    held: Iterable[Sequence[int]],
    rows: Mapping[str, Row],
    first_starts: Mapping[Request, int],
    watch: CacheWatch,
    num_drafts: int,
    is_loaded: bool,
) -> None:
    """Everything that is too dear to be looked at in every step."""
    held = list(held)
    for pool in kv_cache.pools:
        check_conservation(pool, requests, held)
    for request in requests:
        first_start = first_starts.get(request, request.num_computed_tokens)
        num_held = check_tables(request, kv_cache, config, first_start)
        # What a refusal counts on: the last token has no KV, but drafts behind it may.
        num_tokens = request.max_num_tokens - 1 + num_drafts
        most = kv_cache.max_blocks_for(num_tokens, request.num_encoder_tokens)
        if num_held > most and not is_loaded:
            raise BrokenInvariant(
                "progress", f"{request.request_id} holds {num_held} blocks, not {most} at most"
            )
        if request.status is RequestStatus.RUNNING:
            check_row(request, rows, config)
    if config.enable_prefix_caching:
        check_events(kv_cache.pools, watch)
    check_queues(scheduler, requests)


def check_conservation(pool: BlockPool, requests: Sequence[Request], held: Iterable[Sequence[int]]) -> None:
    """kv-conservation: each block is held as often as it is listed, or free; never both, never neither."""
    holders: Counter[int] = Counter()
    for request in requests:
        for table in request.block_tables:
            holders.update(table.block_ids)
    for block_ids in held:
        holders.update(block_ids)
    del holders[PLACEHOLDER_BLOCK_ID]
    block_ids = pool.block_ids
    counts = list(map(pool.ref_count, block_ids))
    expected = [holders[block_id] for block_id in block_ids]
    if counts != expected:
        raise BrokenInvariant("kv-conservation", f"blocks are counted {counts}, listed {expected}")
    free = free_block_ids(pool)
    if sorted(free) != [block_id for block_id in block_ids if not holders[block_id]]:
        raise BrokenInvariant("kv-conservation", f"free are {free}, listed {expected}")
    if len(free) != pool.num_free_blocks:
        raise BrokenInvariant("kv-conservation", f"{len(free)} blocks are free, not {pool.num_free_blocks}")


def check_tables(request: Request, kv_cache: KVCache, config: CacheConfig, first_start: int) -> int:
    """kv-conservation: tables hold what is still read. Returns how many blocks they hold."""
    if not request.block_tables:
        expect(
            request.num_computed_tokens == 0,
            "kv-conservation",
            f"{request.request_id} computed without blocks",
        )
        return 0
    expect(
        request.status is not RequestStatus.WAITING
        or not request.num_preemptions
        or request.num_computed_tokens > 0,
        "kv-conservation",
        f"{request.request_id} was preempted and holds blocks",
    )
    num_held = 0
    for group, (kind, table) in enumerate(zip(config.groups, request.block_tables, strict=True)):
        block_ids = table.block_ids
        num_released = table.num_released
        kept = block_ids[num_released:]
        if isinstance(kind, STATES):
            # Only some of the states are there.
            kept = list(filter(None, kept))
        # Slots of states are not counted among the blocks.
        num_held += 0 if isinstance(kind, KeptState) else len(kept)
        if any(block_ids[:num_released]) or PLACEHOLDER_BLOCK_ID in kept or len(set(kept)) != len(kept):
            raise BrokenInvariant(
                "kv-conservation", f"{request.request_id}, group {group}: table {block_ids}"
            )
        if num_released * kind.block_size > first_read(kind, first_start):
            raise BrokenInvariant(
                "kv-conservation",
                f"{request.request_id}, group {group}: {num_released} blocks are given back, "
                f"but the token at {first_start} reads from {first_read(kind, first_start)} on",
            )
        check_keys(request, group, kind, kv_cache)
    return num_held


def check_keys(request: Request, group: int, kind: AttentionKind, kv_cache: KVCache) -> None:
    """hash-soundness: of the blocks of a request, those that are registered are found by its hashes."""
    table = request.block_tables[group]
    num_hashes = kind.block_size // kv_cache.hasher.block_size
    for index in range(table.num_released, len(table.block_ids)):
        if isinstance(kind, STATES) and not table.block_ids[index]:
            continue
        key = content_of(kv_cache, table.block_ids[index])
        if index >= table.num_registered:
            if key is not None:
                raise BrokenInvariant(
                    "hash-soundness", f"{request.request_id}: block {index} has a key too early"
                )
            continue
        place = (index + 1) * num_hashes - 1
        if place >= len(request.block_hashes) or key != content_key(request.block_hashes[place], group):
            raise BrokenInvariant(
                "hash-soundness", f"{request.request_id}: block {index} has the key of another"
            )


def check_states(
    kv_cache: KVCache,
    config: CacheConfig,
    memories: Sequence[Mapping[int, tuple[int, ...]]],
    digest_of: Mapping[bytes, int],
) -> None:
    """isolation: a block of a state is free, in use by one request, or kept with the hash of its tokens.

    digest_of: by the hash of a prefix, what the state after it is.
    """
    for group, kind in enumerate(config.groups):
        if not isinstance(kind, STATES):
            continue
        for pool in kv_cache.pools:
            for block_id in pool.block_ids:
                key = pool.content_of(block_id)
                if key is None:
                    if isinstance(kind, KeptState) and pool is kv_cache.pools[-1]:
                        expect(pool.ref_count(block_id) <= 1, "isolation", f"state {block_id} has two users")
                elif key == content_key(key[:_HASH_BYTES], group):
                    found, expected = memories[group].get(block_id), digest_of[key[:_HASH_BYTES]]
                    if found != (expected,):
                        raise BrokenInvariant("isolation", f"state {block_id} is not that of its hash")


def check_row(request: Request, rows: Mapping[str, Row], config: CacheConfig) -> None:
    """What a runner has put together from plans is what the scheduler knows."""
    row = rows.get(request.request_id)
    if row is None:
        raise BrokenInvariant("order", f"{request.request_id} runs, but no plan admitted it")
    for kind, table, known in zip(config.groups, request.block_tables, row.tables, strict=True):
        first = table.num_released
        if isinstance(kind, STATES):
            # A state that the row has gone on from in its block is not there any more.
            known = [block_id if kept else 0 for block_id, kept in zip(known, table.block_ids, strict=False)]
        if len(table.block_ids) != len(known) or table.block_ids[first:] != known[first:]:
            raise BrokenInvariant(
                "order", f"{request.request_id}: table {table.block_ids}, runner has {known}"
            )


def check_events(pools: Sequence[BlockPool], watch: CacheWatch) -> None:
    """The events of the cache add up to exactly what can be found."""
    keys = {content_key(block_hash, group) for block_hash, group in watch.stored}
    is_found = all(any(pool.find(key) is not None for pool in pools) for key in keys)
    if len(keys) != sum(pool.num_cached_keys for pool in pools) or not is_found:
        raise BrokenInvariant("hash-soundness", "the events do not tell what can be found")


def check_queues(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Every unfinished request is in exactly one queue, by its status; the statistics agree with it."""
    running = {request.request_id for request in requests if request.status is RequestStatus.RUNNING}
    waiting = [request for request in requests if request.request_id not in running]
    running_ids, waiting_ids = scheduler.running_ids, scheduler.waiting_ids
    if len(running_ids) != len(running) or set(running_ids) != running:
        raise BrokenInvariant("order", f"running are {running_ids}, by status {running}")
    if sorted(waiting_ids) != sorted(request.request_id for request in waiting):
        raise BrokenInvariant("order", f"waiting are {waiting_ids}, running {running}")
    stats = scheduler.stats()
    blocked = [request for request in waiting if request.status is RequestStatus.BLOCKED]
    if (stats.num_running, stats.num_blocked, stats.num_waiting) != (
        len(running),
        len(blocked),
        len(waiting) - len(blocked),
    ):
        raise BrokenInvariant("order", f"figures {stats} of {len(running)} running, {len(waiting)} waiting")
    if any(not request.blockers for request in blocked) or num_unfinished(scheduler) != len(requests):
        raise BrokenInvariant("order", f"blocked by nothing, or not counted: {blocked}")
    if stats.num_waiting_tokens != sum(request.num_uncached_tokens for request in waiting):
        raise BrokenInvariant("order", f"{stats.num_waiting_tokens} tokens are said to wait")
