"""The events of the prefix cache adds up to exactly what can be found, whatever the engine did."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.observer import StoredBlocks
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.kv_events.scheduler import KVEvents
from engine_svc.loop.mailbox import AllBlocksRemoved, KVEvent, KVEventLog, RemovedBlocks
from engine_svc.session.kv_subscription import parents_first
from tests.engine_svc.core_state import key_of
from tests.engine_svc.scheduler.fakes import Stage

NUM_BLOCKS = 30
NUM_ROUNDS = 250
GROUPS: dict[str, tuple[AttentionKind, ...]] = {
    "full": (FullAttention(4),),
    "sliding": (SlidingWindow(4, 6),),
    "full and sliding": (FullAttention(4), SlidingWindow(4, 10)),
    "full and sliding, of other sizes": (FullAttention(16), SlidingWindow(4, 4)),
    "full, sliding and chunked": (FullAttention(8), SlidingWindow(4, 20), ChunkedLocal(8, 16)),
}


class Replica:
    """What can be found, known from the events alone. A change that is none is an error."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, int], tuple[bytes, tuple[int, ...]]] = {}
        self.seen: Counter[str] = Counter()

    def apply(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            self.seen[type(event).__name__] += 1
            match event:
                case StoredBlocks():
                    self.store(event)
                case RemovedBlocks():
                    for block_hash in event.block_hashes:
                        del self.blocks[block_hash, event.group]
                case AllBlocksRemoved():
                    self.blocks.clear()

    def store(self, stored: StoredBlocks) -> None:
        parent, size = stored.parent_hash, stored.block_size
        assert len(stored.token_ids) == size * len(stored.block_hashes)
        for index, block_hash in enumerate(stored.block_hashes):
            assert (block_hash, stored.group) not in self.blocks
            tokens = tuple(stored.token_ids[index * size : (index + 1) * size])
            self.blocks[block_hash, stored.group] = (parent, tokens)
            parent = block_hash


class PublishingCore:
    """A core whose events go into a log and a replica."""

    def __init__(self, *, max_batch_blocks: int = 1000, **stage) -> None:
        self.log = KVEventLog(max_batches=10_000, max_blocks=1_000_000)
        self.reader = self.log.open_with_snapshot(lambda: None)[0]
        self.replica = Replica()
        self.batch_sizes: list[int] = []
        events = KVEvents(self.log.publish, max_batch_blocks=max_batch_blocks)
        stage = {"num_blocks": NUM_BLOCKS, "block_size": 4, "max_model_len": 64, **stage}
        self.stage = Stage(features=[events], **stage)

    def read(self) -> list[list[KVEvent]]:
        batches = self.log.take(self.reader, 10_000)
        assert batches is not None
        for batch in batches:
            self.replica.apply(batch.events)
            self.batch_sizes.append(batch.num_blocks)
            assert batch.num_blocks == sum(map(_num_blocks, batch.events))
        assert [batch.seq for batch in batches] == list(
            range(self.reader.seq - len(batches) + 1, self.reader.seq + 1)
        )
        return [list(batch.events) for batch in batches]

    def findable(self) -> set[tuple[bytes, int]]:
        """What can be found, asked of the pool itself."""
        pool = self.stage.pool
        keys = {key_of(pool, block_id) for block_id in range(pool.num_usable_blocks + 1)}
        return {(key[:32], key[32] if len(key) > 32 else 0) for key in keys if key is not None}


class Workload:
    """Requests with common beginnings that come, end, are aborted and preempted, and steps of them."""

    def __init__(self, seed: int, stage: Stage, depth: int) -> None:
        self.rng = random.Random(seed)
        self.stage = stage
        self.depth = depth
        self.in_flight: list[StepPlan] = []
        self.unfinished: list[str] = []
        self.num_added = 0

    def play(self) -> bool:
        """One round: things that happen between steps, and a step. Whether tokens of a step came back."""
        rng, scheduler = self.rng, self.stage.scheduler
        if rng.random() < 0.5 and len(self.unfinished) < 6:
            self.add()
        if rng.random() < 0.04 and self.unfinished:
            scheduler.abort([rng.choice(self.unfinished)], self.stage.now)
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(self.stage.now, reset_running=rng.random() < 0.5)
        plan = self.stage.schedule()
        if plan.request_ids:
            self.in_flight.append(plan)
        is_updated = len(self.in_flight) == self.depth or bool(self.in_flight and not plan.request_ids)
        if is_updated:
            oldest = self.in_flight.pop(0)
            # Few tokens, so that outputs are often equal as well.
            self.stage.update(oldest, {name: [rng.choice((5, 5, 6))] for name in oldest.request_ids})
        alive = {*scheduler.running_ids, *scheduler.waiting_ids}
        self.unfinished = [name for name in self.unfinished if name in alive]
        return is_updated

    def lose_steps(self) -> bool:
        """Plan a step, which fails with those in flight. Whether there were any."""
        num_lost = len(self.in_flight) + bool(self.stage.schedule().request_ids)
        self.in_flight.clear()
        self.stage.scheduler.withdraw(self.stage.now)
        return num_lost > 0

    def add(self) -> None:
        rng = self.rng
        head = [10 + rng.randrange(2)] * rng.choice((4, 8, 12))
        prompt = head + [rng.randrange(20, 23)] * rng.randrange(1, 20)
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 20), skip_reading_prefix_cache=rng.random() < 0.3
        )
        request = Request(f"r{self.num_added}", prompt, len(prompt), sampling, cache_salt=rng.choice("aab"))
        self.num_added += 1
        if self.stage.scheduler.refusal(request) is None:
            self.stage.add(request)
            self.unfinished.append(request.request_id)


@pytest.mark.parametrize("depth", [1, 2], ids=["lockstep", "overlapped"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_events_add_up_to_what_can_be_found_after_every_step(groups, depth):
    seen: Counter[str] = Counter()
    for seed in range(4):
        core = PublishingCore(groups=groups, max_num_batched_tokens=24, async_scheduling=depth == 2)
        workload = Workload(seed, core.stage, depth)
        for _ in range(NUM_ROUNDS):
            is_withdrawn = workload.rng.random() < 0.05
            is_updated = workload.lose_steps() if is_withdrawn else workload.play()
            core.read()
            if is_updated:
                assert set(core.replica.blocks) == core.findable(), seed
                seen["withdrawals" if is_withdrawn else "updates"] += 1
        assert max(core.batch_sizes) <= NUM_BLOCKS + 24
        seen += core.replica.seen
        seen["preemptions"] += core.stage.scheduler.stats().num_preemptions
        seen["hits"] += core.stage.scheduler.stats().prefix_hits
    assert seen["updates"] > 500 and seen["withdrawals"] > 20
    for name in ("StoredBlocks", "RemovedBlocks", "AllBlocksRemoved", "preemptions", "hits"):
        assert seen[name] > 0, name


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_snapshot_and_the_batches_behind_it_add_up_to_the_same(groups):
    num_checked = 0
    for seed in range(3):
        core = PublishingCore(groups=groups, max_num_batched_tokens=24)
        workload = Workload(seed + 50, core.stage, 1)
        followers: list[PublishingCore] = []
        for index in range(NUM_ROUNDS):
            workload.play()
            if index % 25 == 24:
                followers.append(_late_follower(core.log))
            core.read()
            for follower in followers:
                follower.read()
                assert follower.replica.blocks == core.replica.blocks
                num_checked += bool(follower.replica.blocks)
    assert num_checked > 1000


def _late_follower(log: KVEventLog) -> PublishingCore:
    follower = PublishingCore()
    follower.log = log
    follower.reader, snapshot = log.open_with_snapshot(lambda: None)
    held = {(block.block_hashes[0], block.group) for block in snapshot}
    for block in parents_first(snapshot):
        parent = (block.parent_hash, block.group)
        assert parent in follower.replica.blocks or parent not in held
        follower.replica.store(block)
    return follower


def test_parents_come_first_although_they_were_stored_later():
    def block(name: bytes, parent: bytes, group: int = 0) -> StoredBlocks:
        return StoredBlocks([name], parent, [1], 1, group)

    blocks = [block(b"c", b"b"), block(b"e", b"d"), block(b"b", b"a"), block(b"a", b""), block(b"c", b"b", 1)]
    order = [(block.block_hashes[0], block.group) for block in parents_first(blocks)]
    assert order == [(b"a", 0), (b"b", 0), (b"c", 0), (b"e", 0), (b"c", 1)]


def _request(request_id: str, prompt: list[int], *, max_tokens: int = 1, reads: bool = True) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=not reads)
    return Request(request_id, prompt, len(prompt), sampling)


def test_blocks_are_reported_once_their_step_is_computed():
    core = PublishingCore()
    core.stage.add(_request("a", list(range(10, 19))))
    plan = core.stage.schedule()
    assert core.findable()
    assert core.read() == []
    core.stage.update(plan)
    ((stored,),) = core.read()
    assert isinstance(stored, StoredBlocks)
    assert (len(stored.block_hashes), stored.token_ids) == (2, list(range(10, 18)))
    assert (stored.block_size, stored.group) == (4, 0)
    assert stored.parent_hash == core.stage.cache.hasher.root()


def test_a_run_continues_where_the_one_before_it_ended():
    core = PublishingCore(max_num_batched_tokens=8)
    core.stage.add(_request("a", list(range(10, 27))))
    core.stage.step_until_idle()
    (first,), (second,) = core.read()
    assert isinstance(first, StoredBlocks)
    assert isinstance(second, StoredBlocks)
    assert second.parent_hash == first.block_hashes[-1]
    assert first.token_ids + second.token_ids == list(range(10, 26))


def test_steps_that_change_nothing_are_not_reported():
    core = PublishingCore()
    core.stage.add(_request("a", [9], max_tokens=7))
    core.stage.step_until_idle()
    assert len(core.read()) == 1
    assert core.stage.scheduler.stats().step_number >= 7


def test_equal_content_is_reported_once_and_removed_with_its_last_block():
    core = PublishingCore(num_blocks=7)
    prompt = list(range(10, 18))
    for name in ("a", "b"):
        # The last of three blocks has one token only, so it is never found.
        core.stage.add(_request(name, [*prompt, ord(name)], reads=False))
        core.stage.step_until_idle()
    ((stored,),) = core.read()
    assert isinstance(stored, StoredBlocks)
    # Of six blocks two are without content, then come those of "a", then those of "b".
    removed = []
    for first, num_tokens in ((30, 4 * 4), (50, 6 * 4)):
        core.stage.add(_request(f"new {first}", list(range(first, first + num_tokens - 1))))
        core.stage.step_until_idle()
        events = [event for batch in core.read() for event in batch]
        removed.append({name for event in events for name in _removed_by(event)})
        assert set(core.replica.blocks) == core.findable()
    assert not removed[0] & set(stored.block_hashes)
    assert removed[1] >= set(stored.block_hashes)


def test_a_cleared_cache_is_reported_at_once():
    core = PublishingCore()
    core.stage.add(_request("a", list(range(10, 19))))
    core.stage.step_until_idle()
    core.read()
    assert core.stage.scheduler.reset_prefix_cache(1.0)
    assert core.read() == [[AllBlocksRemoved()]]
    assert core.replica.blocks == {}
    core.stage.add(_request("b", list(range(10, 19))))
    core.stage.step_until_idle()
    core.read()
    assert set(core.replica.blocks) == core.findable() != set()


def test_evictions_of_a_plan_without_rows_are_reported_when_the_last_request_ends():
    published: list[Sequence[KVEvent]] = []
    events = KVEvents(lambda batch, num_blocks: published.append(batch))
    events.on_store(StoredBlocks([b"a"], b"root", [1], 1, 0))
    plan, ended = StepPlan(1), _request("a", [1])
    events.on_plan(plan)
    events.on_finish(ended)
    assert published == []
    events.on_update(plan, StepResult(1, []))
    assert len(published) == 1
    events.on_evict(3, b"a", 0)
    events.on_finish(ended)
    assert published[1:] == [[RemovedBlocks([b"a"], 0)]]


def test_after_a_failed_step_evictions_by_the_last_request_are_reported_at_once():
    published: list[Sequence[KVEvent]] = []
    events = KVEvents(lambda batch, num_blocks: published.append(batch))
    events.on_store(StoredBlocks([b"a"], b"root", [1], 1, 0))
    for number in (1, 2):
        events.on_plan(StepPlan(number))
    events.on_withdraw()
    assert len(published) == 1
    events.on_evict(3, b"a", 0)
    events.on_finish(_request("a", [1]))
    assert published[1:] == [[RemovedBlocks([b"a"], 0)]]


def test_a_batch_is_bounded_and_numbers_have_no_gaps():
    core = PublishingCore(max_batch_blocks=3, max_num_batched_tokens=64)
    for name in "abcd":
        core.stage.add(_request(name, [ord(name)] * 9))
    core.stage.step_until_idle()
    core.read()
    assert core.batch_sizes == [4, 4]
    assert set(core.replica.blocks) == core.findable()
    assert core.reader.seq == 2


def _removed_by(event: KVEvent) -> list[bytes]:
    return event.block_hashes if isinstance(event, RemovedBlocks) else []


def _num_blocks(event: KVEvent) -> int:
    return 0 if isinstance(event, AllBlocksRemoved) else len(event.block_hashes)
