"""GenerateBatch: many prompts in one call, a limited number at a time, each with its own result or error."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from frontend_svc.generation.caller import Caller
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import error_pb2
from triptych_kit.errors import AlreadyExists, InvalidArgument, ResourceExhausted, ServiceError, to_parts
from triptych_kit.rules import rules_of

StreamOf = Callable[
    [generate_pb2.GenerateRequest, Caller], AsyncGenerator[generate_pb2.GenerateResponse, None]
]

MAX_BATCH_ITEMS = rules_of(inference_pb2.GenerateBatchRequest, "requests").max_items
# One batch must leave most of the queue to other calls.
_MAX_RUNNING_ITEMS = 256
# Messages queued for the call. While the queue is full the items wait, and their outputs are merged.
_MAX_WAITING_MESSAGES = 256


async def stream_batch(
    stream_of: StreamOf, requests: Sequence[generate_pb2.GenerateRequest], caller: Caller
) -> AsyncGenerator[inference_pb2.GenerateBatchResponse, None]:
    """The messages of all items as they arrive, in order for each item. Closing it aborts running items.

    An item that is refused or fails produces one error. Raises InvalidArgument for a batch without items or
    with too many.
    """
    if not 1 <= len(requests) <= MAX_BATCH_ITEMS:
        raise InvalidArgument(
            f"requests has {len(requests)} items, must be 1..{MAX_BATCH_ITEMS}", field="requests"
        )
    batch = _Batch(stream_of, requests, caller)
    running = asyncio.ensure_future(batch.run())
    try:
        while (message := await batch.messages.get()) is not None:
            yield message
        await running
    finally:
        running.cancel()
        await asyncio.wait((running,))


class _Batch:
    """The items of one call. An item that finds the queue full waits until another item leaves it."""

    def __init__(
        self, stream_of: StreamOf, requests: Sequence[generate_pb2.GenerateRequest], caller: Caller
    ) -> None:
        self.messages: asyncio.Queue[inference_pb2.GenerateBatchResponse | None] = asyncio.Queue(
            _MAX_WAITING_MESSAGES
        )
        self._stream_of = stream_of
        self._requests = requests
        self._caller = caller
        self._refused = dict(_repeated_ids(requests))
        self._beginning = asyncio.Lock()
        # Admitted items of this batch without output yet, and items that wait for one of those.
        self._num_queued = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self) -> None:
        """Run all items; None is the last message."""
        items = iter(enumerate(self._requests))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(self._requests), _MAX_RUNNING_ITEMS)):
                    tasks.create_task(self._run_items(items))
        finally:
            # If the reader has gone, the queue is full, and no end is needed.
            if not self.messages.full():
                self.messages.put_nowait(None)
            elif (task := asyncio.current_task()) is not None and not task.cancelling():
                await self.messages.put(None)

    async def _run_items(self, items: Iterator[tuple[int, generate_pb2.GenerateRequest]]) -> None:
        for index, request in items:
            # One item a turn of the event loop: many that begin, or are refused, at once would hold it.
            async with self._beginning:
                await asyncio.sleep(0)
            try:
                await self._run_item(index, request)
            except ServiceError as error:
                self._wake()
                await self._send(index, error=error_status(error))

    async def _run_item(self, index: int, request: generate_pb2.GenerateRequest) -> None:
        if index in self._refused:
            raise self._refused[index]
        if request.orphan_grace_ms:
            raise InvalidArgument(
                f"orphan_grace_ms is {request.orphan_grace_ms}, must be 0: a batch cannot be resumed",
                field="orphan_grace_ms",
            )
        caller = dataclasses.replace(self._caller, is_repeated=self._is_repeated)
        while not await self._stream_item(index, request, caller):
            caller = dataclasses.replace(caller, is_repeat=True)
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _is_repeated(self, error: ServiceError) -> bool:
        """Whether the item with this error waits for another one that is in the queue beside it."""
        return error.reason == "QUEUE_FULL" and self._num_queued > 1

    async def _stream_item(self, index: int, request: generate_pb2.GenerateRequest, caller: Caller) -> bool:
        """Send all of an item; False if it has to wait first."""
        self._num_queued += 1
        is_queued = True
        try:
            async with contextlib.aclosing(self._stream_of(request, caller)) as responses:
                async for response in responses:
                    if is_queued:
                        is_queued = False
                        self._num_queued -= 1
                        self._wake()
                    await self._send(index, response=response)
            return True
        except ResourceExhausted as error:
            if not self._is_repeated(error):
                raise
            return False
        finally:
            self._num_queued -= is_queued

    def _wake(self) -> None:
        # Two, although one item left: a long prompt that leaves may make room for several short ones.
        for _ in range(min(2, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    async def _send(
        self,
        index: int,
        *,
        response: generate_pb2.GenerateResponse | None = None,
        error: error_pb2.ErrorStatus | None = None,
    ) -> None:
        await self.messages.put(
            inference_pb2.GenerateBatchResponse(item_index=index, response=response, error=error)
        )


def error_status(error: ServiceError) -> error_pb2.ErrorStatus:
    """An error as a message; its details are a serialized google.rpc.Status."""
    code, message, details = to_parts(error)
    return error_pb2.ErrorStatus(code=code, message=message, details=details)


def _repeated_ids(requests: Sequence[generate_pb2.GenerateRequest]) -> Iterator[tuple[int, ServiceError]]:
    # Checked up front: whether two of them are in flight together depends on how many run at a time.
    seen: set[str] = set()
    for index, request in enumerate(requests):
        if request.request_id and request.request_id in seen:
            yield (
                index,
                AlreadyExists(
                    f"request_id {request.request_id!r} is of an earlier item of the batch, too",
                    reason="DUPLICATE_REQUEST_ID",
                ),
            )
        seen.add(request.request_id)
