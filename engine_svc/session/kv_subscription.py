"""One subscriber of KV cache events: a snapshot or a cursor to resume from, then batches as they arrive.

Runs on the event loop. Knows no gRPC call: `servicer.py` moves the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice

from engine_svc.admin.served_engine import ServedEngine
from engine_svc.cache.observer import StoredBlocks
from engine_svc.convert import messages
from engine_svc.loop.mailbox import KVEventLog, KVEventReader
from triptych.engine.v1 import engine_pb2, kv_pb2
from triptych_kit.errors import DataLoss, OutOfRange, Unavailable

_MAX_CHUNK_BLOCKS = 1024
_MAX_BATCHES_AT_ONCE = 64
# Heartbeats that an ending stream may take to send its last messages: 2 s.
_MAX_ENDING_BEATS = 4


class KVSubscription:
    """Messages for one subscriber, at its own pace. It is cut off when the log drops its position."""

    def __init__(
        self,
        engine: ServedEngine,
        log: KVEventLog,
        request: engine_pb2.SubscribeKvEventsRequest,
        *,
        abandon: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._log = log
        self._abandon = abandon
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._num_ending_beats = 0
        self._snapshot: list[StoredBlocks] | None = None
        if request.HasField("cursor"):
            self._reader = self._resume(request.cursor)
        else:
            self._reader, self._snapshot = log.open_with_snapshot(self._wake)

    async def responses(self) -> AsyncGenerator[engine_pb2.SubscribeKvEventsResponse, None]:
        """The snapshot, if one was requested, then every later batch, until the engine ends."""
        epoch, lifecycle = self._engine.identity.engine_epoch, self._engine.lifecycle
        if self._snapshot is not None:
            end = kv_pb2.KvCursor(engine_epoch=epoch, seq=self._reader.seq)
            blocks, self._snapshot = parents_first(self._snapshot), None
            chunk = list(islice(blocks, _MAX_CHUNK_BLOCKS))
            while following := list(islice(blocks, _MAX_CHUNK_BLOCKS)):
                yield messages.to_kv_snapshot(chunk, None)
                chunk = following
            yield messages.to_kv_snapshot(chunk, end)
        while True:
            self._changed.clear()
            has_ended = lifecycle.has_ended
            batches = self._log.take(self._reader, _MAX_BATCHES_AT_ONCE)
            if batches is None:
                raise DataLoss(
                    "slow consumer: the subscriber does not read its batches", reason="SLOW_READER"
                )
            for batch in batches:
                yield messages.to_kv_batch(batch, epoch)
            if batches:
                continue
            if has_ended:
                break
            await self._changed.wait()
        failure = self._engine.failure
        if failure is not None:
            raise Unavailable(f"engine failed: {failure.reason}", reason="ENGINE_DEAD")

    def beat(self) -> None:
        """Abandon a subscriber that has to be cut off and is connected but does not read."""
        if self._engine.lifecycle.has_ended or self._log.has_lost(self._reader):
            self._num_ending_beats += 1
            if self._num_ending_beats > _MAX_ENDING_BEATS:
                # Its writer is blocked in a write, which nothing else interrupts.
                self._abandon()

    def on_state(self) -> None:
        """Called on each change of the engine's state."""
        self._changed.set()

    def close(self) -> None:
        self._log.close(self._reader)

    def _resume(self, cursor: kv_pb2.KvCursor) -> KVEventReader:
        epoch = self._engine.identity.engine_epoch
        if cursor.engine_epoch != epoch:
            raise OutOfRange(
                f"cursor is of engine epoch {cursor.engine_epoch}, this engine has {epoch}: "
                "subscribe without a cursor",
                reason="CURSOR_GONE",
            )
        reader = self._log.open(cursor.seq, self._wake)
        if reader is None:
            raise OutOfRange(
                f"batches after {cursor.seq} are no longer kept: subscribe without a cursor",
                reason="CURSOR_GONE",
            )
        return reader

    def _wake(self) -> None:
        """Called in the engine thread."""
        self._loop.call_soon_threadsafe(self._changed.set)


def parents_first(blocks: Iterable[StoredBlocks]) -> Iterator[StoredBlocks]:
    """Order single blocks so that each follows its parent, where the parent is among them."""
    waiting = {(block.block_hashes[0], block.group): block for block in blocks}
    for key in list(waiting):
        chain = []
        block = waiting.pop(key, None)
        while block is not None:
            chain.append(block)
            block = waiting.pop((block.parent_hash, block.group), None)
        yield from reversed(chain)
