"""Subscribers of the prefix cache over real gRPC: snapshots, cursors, slow readers, the end of the engine."""

from __future__ import annotations

import asyncio
import logging
from array import array
from concurrent.futures import Future

import grpc.aio

from engine_svc.build.engine import Core, build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.errors import DeviceLost
from engine_svc.features.kv_events.scheduler import KVEvents
from engine_svc.loop.mailbox import Call, KVEventLog
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.core_state import key_of
from tests.engine_svc.fakes import LIMIT_S, MAX_MODEL_LEN
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, make_entry, served, serving
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, kv_pb2

EPOCH = 7  # of the rig's engine
CODE = grpc.StatusCode


class Follower:
    """A subscriber that keeps what it receives, and what that adds up to. A change of nothing is an error."""

    def __init__(
        self, stub: engine_pb2_grpc.EngineCoreServiceStub, cursor: kv_pb2.KvCursor | None = None
    ) -> None:
        self.call = stub.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest(cursor=cursor))
        self.cursor: kv_pb2.KvCursor | None = None
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}  # parent and tokens by hash
        self.num_snapshot_chunks = 0
        self.has_snapshot = False
        self.seqs: list[int] = []

    async def read(self) -> bool:
        """Take in one message. False at the end of the stream."""
        async with asyncio.timeout(LIMIT_S):
            message = await self.call.read()
        if not isinstance(message, engine_pb2.SubscribeKvEventsResponse):
            return False
        if message.HasField("cursor"):
            self.cursor = message.cursor
        if message.WhichOneof("content") == "snapshot":
            assert not self.has_snapshot
            assert message.HasField("cursor") == message.snapshot.is_last
            self.num_snapshot_chunks += 1
            self.has_snapshot = message.snapshot.is_last
            for stored in message.snapshot.blocks:
                self.store(stored)
            return True
        assert message.cursor.engine_epoch == EPOCH
        self.seqs.append(message.cursor.seq)
        for event in message.batch.events:
            match event.WhichOneof("event"):
                case "stored":
                    self.store(event.stored)
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash]
                case "cleared":
                    self.blocks.clear()
        return True

    def store(self, stored: kv_pb2.KvBlockStored) -> None:
        assert (stored.block_size, stored.group) == (4, 0)
        parent = stored.parent_hash
        for index, block_hash in enumerate(stored.block_hashes):
            assert block_hash not in self.blocks
            self.blocks[block_hash] = (parent, stored.token_ids[index * 16 : index * 16 + 16])
            parent = block_hash

    async def read_to(self, seq: int) -> None:
        while self.cursor is None or self.cursor.seq < seq:
            assert await self.read()

    async def read_to_error(self) -> grpc.aio.AioRpcError:
        """Take in what comes until the stream fails."""
        try:
            while await self.read():
                continue
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream ended without an error")


class FollowedRig(ServiceRig):
    """A service whose cache can be followed."""

    def __init__(self, *, num_blocks: int = 65, max_batches: int = 10_000) -> None:
        self.log = KVEventLog(max_batches=max_batches, max_blocks=1_000_000)
        events = KVEvents(self.log.publish)
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=256)
        self.core: Core = build_core(config, CacheConfig(num_blocks, (FullAttention(4),)), features=[events])
        super().__init__(scheduler=self.core.scheduler, kv_event_log=self.log)
        self.num_blocks = num_blocks
        self._num_runs = 0

    async def run(
        self, stub: engine_pb2_grpc.EngineCoreServiceStub, *, num_requests: int = 8, max_tokens: int = 20
    ) -> int:
        """Let a frontend generate; returns the number of the last batch."""
        self._num_runs += 1
        client = StreamClient(stub, f"frontend {self._num_runs}")
        await client.open()
        handles = range(self._num_runs * 1000, self._num_runs * 1000 + num_requests)
        await client.add(*(make_entry(handle, max_tokens=max_tokens) for handle in handles))
        await client.until_ended(*handles)
        await client.close()
        reader, _ = self.log.open_with_snapshot(lambda: None)
        self.log.close(reader)
        return reader.seq

    async def run_until(self, stub: engine_pb2_grpc.EngineCoreServiceStub, seq: int) -> int:
        """Let frontends generate until there are so many batches; returns the number of the last."""
        while True:
            last_seq = await self.run(stub, num_requests=32, max_tokens=100)
            if last_seq >= seq:
                return last_seq

    async def findable(self) -> set[bytes]:
        """What can be found, asked of the pool itself."""
        answer: Future[set[bytes]] = Future()
        assert self.engine.inbox.put(Call(lambda: answer.set_result(self._keys())))
        return await asyncio.wait_for(asyncio.wrap_future(answer), LIMIT_S)

    def _keys(self) -> set[bytes]:
        pool = self.core.kv_cache.pool
        keys = {key_of(pool, block_id) for block_id in range(self.num_blocks)}
        return {key for key in keys if key is not None}


async def test_a_snapshot_and_what_follows_are_what_can_be_found():
    rig = FollowedRig()
    async with serving(rig) as stub:
        early = Follower(stub)
        await early.read()
        assert (early.num_snapshot_chunks, early.has_snapshot, early.blocks) == (1, True, {})
        assert early.cursor == kv_pb2.KvCursor(engine_epoch=EPOCH, seq=0)
        seq = await rig.run(stub)
        await early.read_to(seq)
        assert set(early.blocks) == await rig.findable() != set()
        late = Follower(stub)
        await late.read()
        assert (late.blocks, late.cursor) == (early.blocks, early.cursor)
        # 64 blocks do not hold all of it, so some of what was cached has to go.
        seq = await rig.run(stub, num_requests=16)
        await early.read_to(seq)
        await late.read_to(seq)
        assert set(early.blocks) == await rig.findable()
        assert late.blocks == early.blocks
        assert early.seqs == list(range(1, seq + 1))
        parents = {parent for parent, _ in early.blocks.values()}
        assert rig.core.kv_cache.hasher.root() in parents
        tokens = {array("I", column)[0] for _, column in early.blocks.values()}
        assert len(tokens) > 10


async def test_a_snapshot_comes_in_chunks_with_a_cursor_at_the_end_alone():
    rig = FollowedRig(num_blocks=2000)
    async with serving(rig) as stub:
        seq = await rig.run(stub, num_requests=64, max_tokens=100)
        follower = Follower(stub)
        while not follower.has_snapshot:
            assert await follower.read()
        assert follower.num_snapshot_chunks == 2
        assert set(follower.blocks) == await rig.findable()
        assert len(follower.blocks) > 1024
        assert follower.cursor == kv_pb2.KvCursor(engine_epoch=EPOCH, seq=seq)


async def test_who_comes_back_goes_on_behind_its_cursor():
    rig = FollowedRig()
    async with serving(rig) as stub:
        first = Follower(stub)
        # It follows from here on, and not from where it happens to be let in.
        assert await first.read()
        await first.read_to(await rig.run(stub) - 3)
        first.call.cancel()
        again = Follower(stub, first.cursor)
        again.blocks = dict(first.blocks)
        seq = await rig.run(stub)
        await again.read_to(seq)
        assert again.num_snapshot_chunks == 0
        assert first.seqs + again.seqs == list(range(1, seq + 1))
        assert set(again.blocks) == await rig.findable()


async def test_all_that_is_kept_comes_although_nothing_follows_it():
    rig = FollowedRig()
    async with serving(rig) as stub:
        seq = await rig.run_until(stub, 200)
        follower = Follower(stub, kv_pb2.KvCursor(engine_epoch=EPOCH, seq=0))
        await follower.read_to(seq)
        assert follower.seqs == list(range(1, seq + 1))
        assert set(follower.blocks) == await rig.findable()


async def test_a_cursor_that_is_gone_is_out_of_range():
    rig = FollowedRig(max_batches=5)
    async with serving(rig) as stub:
        seq = await rig.run(stub)
        cursors = {
            "of another epoch": kv_pb2.KvCursor(engine_epoch=EPOCH + 1, seq=seq),
            "too old": kv_pb2.KvCursor(engine_epoch=EPOCH, seq=seq - 6),
            "not there yet": kv_pb2.KvCursor(engine_epoch=EPOCH, seq=seq + 1),
            "of nothing": kv_pb2.KvCursor(),
        }
        for name, cursor in cursors.items():
            error = await Follower(stub, cursor).read_to_error()
            assert error.code() is CODE.OUT_OF_RANGE, name
            assert "subscribe without a cursor" in (error.details() or ""), name
        oldest = Follower(stub, kv_pb2.KvCursor(engine_epoch=EPOCH, seq=seq - 5))
        # What was evicted before cannot be taken in again, so these are only counted.
        for _ in range(5):
            assert (await oldest.call.read()).WhichOneof("content") == "batch"


async def test_an_engine_without_kv_events_names_the_option():
    async with served() as (_, stub):
        error = await Follower(stub).read_to_error()
        assert error.code() is CODE.FAILED_PRECONDITION
        assert "--enable-kv-events" in (error.details() or "")


async def test_a_subscriber_may_come_while_the_model_is_loading():
    rig = FollowedRig()
    async with serving(rig, load=False) as stub:
        follower = Follower(stub)
        await follower.read()
        assert follower.has_snapshot
        await rig.load()
        await follower.read_to(await rig.run(stub))
        assert set(follower.blocks) == await rig.findable()


async def test_one_subscriber_too_many_is_refused_until_another_goes():
    rig = FollowedRig()
    async with serving(rig) as stub:
        followers = [Follower(stub) for _ in range(16)]
        for follower in followers:
            assert await follower.read()
        error = await Follower(stub).read_to_error()
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "16" in (error.details() or "")
        followers[3].call.cancel()
        async with asyncio.timeout(LIMIT_S):
            while rig.servicer.num_kv_subscriptions == 16:
                await stub.GetLoad(engine_pb2.GetLoadRequest())
        assert await Follower(stub).read()
        assert rig.log.num_readers == 16


# A window that does not grow is full after 64 KiB.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
# Some kilobytes each. Twice as many as there can be steps before a client sends again: none falls
# behind because the machine is busy.
MAX_BATCHES = 250
NUM_BATCHES = 600


async def test_who_reads_too_slowly_is_cut_off_and_can_begin_anew():
    rig = FollowedRig(num_blocks=2000, max_batches=MAX_BATCHES)
    async with serving(rig) as stub, grpc.aio.insecure_channel(rig.address, options=SMALL_WINDOW) as channel:
        rig.stop_beating()
        slow = Follower(engine_pb2_grpc.EngineCoreServiceStub(channel))
        assert await slow.read()
        seq = await rig.run_until(stub, NUM_BATCHES)
        error = await slow.read_to_error()
        assert error.code() is CODE.DATA_LOSS
        assert "slow consumer" in (error.details() or "")
        # What it got until then has no gap, so it knows where it stands.
        assert slow.seqs == list(range(1, len(slow.seqs) + 1))
        assert 0 < len(slow.seqs) < seq - MAX_BATCHES
        fresh = Follower(stub)
        await fresh.read_to(seq)
        assert set(fresh.blocks) == await rig.findable()


async def test_who_does_not_read_at_all_is_given_up(caplog):
    caplog.set_level(logging.INFO)
    rig = FollowedRig(num_blocks=2000, max_batches=MAX_BATCHES)
    async with serving(rig) as stub, grpc.aio.insecure_channel(rig.address, options=SMALL_WINDOW) as channel:
        rig.stop_beating()
        deaf = Follower(engine_pb2_grpc.EngineCoreServiceStub(channel))
        assert await deaf.read()
        await rig.run_until(stub, NUM_BATCHES)
        assert rig.servicer.num_kv_subscriptions == 1
        async with asyncio.timeout(LIMIT_S):
            while rig.servicer.num_kv_subscriptions:
                rig.servicer.beat()
                await stub.GetLoad(engine_pb2.GetLoadRequest())
        # Its handler waited in a write that was not read, so it was cancelled.
        codes = [vars(record)["code"] for record in caplog.records if record.message == "call"]
        assert "CANCELLED" in codes
        assert "DATA_LOSS" not in codes


async def test_draining_sends_what_there_is_and_ends_subscriptions_without_an_error():
    rig = FollowedRig()
    async with serving(rig) as stub:
        seq = await rig.run_until(stub, 200)
        follower = Follower(stub, kv_pb2.KvCursor(engine_epoch=EPOCH, seq=0))
        assert await follower.read()
        await asyncio.wait_for(rig.servicer.drain(), LIMIT_S)
        assert (rig.servicer.num_kv_subscriptions, rig.log.num_readers) == (0, 0)
        while await follower.read():
            continue
        assert await follower.call.code() is CODE.OK
        assert follower.seqs == list(range(1, seq + 1))
        assert set(follower.blocks) == await rig.findable()


async def test_a_loop_that_raises_ends_subscriptions_as_unavailable():
    rig = FollowedRig()
    async with serving(rig) as stub:
        follower = Follower(stub)
        assert await follower.read()

        def fail(plan: object) -> None:
            raise DeviceLost("secret path")

        rig.executor.on_launch = fail
        client = StreamClient(stub, "f")
        await client.open()
        await client.add(make_entry(1))
        error = await follower.read_to_error()
        assert error.code() is CODE.UNAVAILABLE
        assert "secret" not in (error.details() or "")
