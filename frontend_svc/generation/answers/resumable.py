"""Resumable streams, which outlive their calls for a grace period, each in a bounded log with one reader.

A task writes each stream into its log; the call that started it, and later Resume, read the log. The log of a
stream adopted from another frontend begins in the middle. Knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from frontend_svc.engines.adoption.takeover import TOKEN_CHARACTERS, not_kept
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.drain import Drain
from frontend_svc.output.collector import ReaderLimit
from frontend_svc.text.prompt import MAX_ORPHAN_GRACE_MS
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_kit.errors import Aborted, InvalidArgument, OutOfRange, ServiceError
from triptych_kit.resumable_stream import Link, ReplayLog, ResumableStream
from triptych_kit.rules import rules_of

Response = generate_pb2.GenerateResponse
StreamOf = Callable[[generate_pb2.GenerateRequest, Caller], AsyncGenerator[Response, None]]

# Logs that were read to their end, kept for clients whose connection broke during the last messages.
_MAX_READ_LOGS = 1024
_TOKEN_BYTES = TOKEN_CHARACTERS // 2
# No stream reaches this position, and later positions do not overflow.
_MAX_POSITION = int(rules_of(inference_pb2.ResumeRequest, "last_position").maximum)


class RestOf(Protocol):
    """See `generate.stream_rest`."""

    def __call__(
        self,
        resume: inference_pb2.ResumeRequest,
        caller: Caller,
        on_adopted: Callable[[generate_pb2.GenerateRequest], None],
    ) -> AsyncGenerator[Response, None]: ...


class RequestStream:
    """The stream of one request: its log, the task that fills it, and the call that reads it.

    When the log is full because its reader is slow, the task waits. Later outputs are merged in the request's
    collector, whose limit aborts the request.
    """

    def __init__(
        self,
        token: str,
        key: str,
        responses: AsyncGenerator[Response, None],
        limit: ReaderLimit,
        grace_s: float,
        is_late: Callable[[], bool],
        on_end: Callable[[RequestStream], None],
        on_read: Callable[[RequestStream], None],
        after: int = 0,
    ) -> None:
        self.token = token
        self.key = key  # what it is kept under: its token, scoped to its tenant
        self.grace_s = grace_s  # how long it is kept without a reader
        # Its limits are those of a client's unread output; items are tokens.
        self._stream: ResumableStream[Response, Link] = ResumableStream(
            ReplayLog(max_bytes=limit.max_bytes, max_items=limit.max_tokens, after=after)
        )
        self._after = after
        self._is_late = is_late
        self._on_end = on_end
        self._on_read = on_read
        self._max_given = after  # the last position sent to any reader
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._drive(responses))

    async def read(self, last_position: int) -> AsyncGenerator[Response, None]:
        """The messages after `last_position`, as they arrive. Replaces the current reader.

        Raises InvalidArgument for a position that was not sent, OutOfRange for one that was dropped, Aborted
        when another reader takes over, and the error with which the stream ended.
        """
        self._check(last_position)
        self._stop_timer()
        stream, link = self._stream, Link(after=last_position)
        stream.attach(link)
        try:
            while stream.link is link:
                message = stream.take(link)
                if message is not None:
                    self._max_given = max(self._max_given, link.seq)
                    if stream.log.is_full:
                        stream.wake()
                    yield message
                elif not stream.is_over:
                    await stream.changed()
                elif stream.error is not None:
                    raise stream.error
                else:
                    # Raises an internal error with which the task may have ended.
                    await asyncio.shield(self._task)
                    return
            raise Aborted("the stream was resumed by another call", reason="RESUMED_ELSEWHERE")
        finally:
            if stream.detach(link):
                self._on_left(link)

    @property
    def is_known(self) -> bool:
        """Whether the token was sent to a client, which may resume with it."""
        return self._max_given > 0

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    def expire(self) -> None:
        """End the stream and abort its request if it still runs."""
        self._stop_timer()
        self._task.cancel()
        self._on_end(self)

    def _check(self, last_position: int) -> None:
        if last_position > self._max_given:
            raise InvalidArgument(
                f"last_position is {last_position}, the last message that was sent has {self._max_given}",
                field="last_position",
            )
        log = self._stream.log
        if not log.can_resume(last_position):
            raise OutOfRange(
                f"the messages after last_position {last_position} are not kept any more, "
                f"those from {log.first_seq} on are",
                reason="POSITION_GONE",
            )

    async def _drive(self, responses: AsyncGenerator[Response, None]) -> None:
        try:
            async with contextlib.aclosing(responses):
                async for message in responses:
                    if message.HasField("started"):
                        message.started.resume_token = self.token
                    log = self._stream.log
                    log.append(message, message.ByteSize(), len(message.delta.token_ids))
                    assert message.position == log.last_seq, "a stream counts its messages without gaps"
                    self._stream.wake()
                    await self._until_there_is_room()
        except ServiceError as error:
            self._stream.end(error)
        finally:
            self._stream.end()

    async def _until_there_is_room(self) -> None:
        stream = self._stream
        while stream.log.is_full:
            # Without a reader nothing is dropped: the client may not have received all that was sent to it.
            if stream.link is not None:
                stream.log.trim(stream.link.seq)
            if stream.log.is_full:
                await stream.changed()

    def _on_left(self, link: Link) -> None:
        stream = self._stream
        has_failed_at_start = stream.error is not None and stream.log.last_seq == self._after
        if self._is_late() or not self.is_known or has_failed_at_start:
            # No client can resume it: the deadline has passed, the token was never sent, or it never began.
            self.expire()
            return
        if stream.is_over and link.seq == stream.log.last_seq:
            self._on_read(self)
        self._timer = asyncio.get_running_loop().call_later(self.grace_s, self.expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ResumableStreams:
    """The resumable streams of this process, by token.

    A stream is forgotten at the end of its grace period, which begins when its call ends for any reason. A
    drain waits for calls that read one, which may last much longer than the stream's request.
    """

    def __init__(self, stream_of: StreamOf, rest_of: RestOf, limit: ReaderLimit, drain: Drain) -> None:
        self._stream_of = stream_of
        self._rest_of = rest_of
        self._limit = limit
        self._drain = drain
        self._streams: dict[str, RequestStream] = {}  # by key
        self._read: OrderedDict[str, RequestStream] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()  # of forgotten streams
        self._left: set[str] = set()  # tokens of streams left to other frontends

    def __len__(self) -> int:
        return len(self._streams)

    async def start(
        self, request: generate_pb2.GenerateRequest, caller: Caller
    ) -> AsyncGenerator[Response, None]:
        """Run a request with an orphan grace period, and read its stream from the start."""
        grace_s = min(request.orphan_grace_ms, MAX_ORPHAN_GRACE_MS) / 1000
        token = secrets.token_hex(_TOKEN_BYTES)
        caller = self._outliving(caller, token)
        messages = self._stream_of(request, caller)
        stream = self._keep(token, messages, grace_s, caller)
        with self._drain.awaited():
            async with contextlib.aclosing(stream.read(0)) as messages:
                async for message in messages:
                    yield message

    async def resume(
        self, request: inference_pb2.ResumeRequest, caller: Caller
    ) -> AsyncGenerator[Response, None]:
        """Continue the stream of a token, which began in this process or in a frontend that has gone.

        Raises NotFound if neither exists.
        """
        stream = self._streams.get(caller.scoped(request.resume_token))
        if stream is None:
            stream = self._take_over(request, caller)
        with self._drain.awaited():
            async with contextlib.aclosing(stream.read(request.last_position)) as messages:
                async for message in messages:
                    yield message

    async def close(self) -> None:
        """Forget all streams. Those whose token a client knows are left for other frontends; others end."""
        streams, self._streams = list(self._streams.values()), {}
        self._read.clear()
        self._left.update(stream.token for stream in streams if stream.is_known)
        for stream in streams:
            stream.expire()
        if self._ending:
            await asyncio.wait(self._ending)

    def _take_over(self, request: inference_pb2.ResumeRequest, caller: Caller) -> RequestStream:
        if request.last_position > _MAX_POSITION:
            raise InvalidArgument(
                f"last_position is {request.last_position}, the limit is {_MAX_POSITION}",
                field="last_position",
            )
        # After `started`, the received part cannot be removed unless the client states what it has received.
        can_be_cut = bool(request.received) or request.last_position == 1
        if not can_be_cut or len(request.resume_token) != TOKEN_CHARACTERS:
            raise not_kept(request.resume_token)

        def on_adopted(adopted: generate_pb2.GenerateRequest) -> None:
            stream.grace_s = min(adopted.orphan_grace_ms, MAX_ORPHAN_GRACE_MS) / 1000

        caller = self._outliving(caller, request.resume_token)
        messages = self._rest_of(request, caller, on_adopted)
        stream = self._keep(
            request.resume_token, messages, MAX_ORPHAN_GRACE_MS / 1000, caller, request.last_position
        )
        return stream

    def _keep(
        self,
        token: str,
        messages: AsyncGenerator[Response, None],
        grace_s: float,
        caller: Caller,
        after: int = 0,
    ) -> RequestStream:
        key = caller.scoped(token)
        stream = RequestStream(
            token,
            key,
            messages,
            self._limit,
            grace_s,
            caller.is_late,
            self._forget,
            self._note_read,
            after,
        )
        self._streams[key] = stream
        return stream

    def _note_read(self, stream: RequestStream) -> None:
        self._read[stream.key] = stream
        if len(self._read) > _MAX_READ_LOGS:
            next(iter(self._read.values())).expire()

    def _forget(self, stream: RequestStream) -> None:
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
        self._read.pop(stream.key, None)
        if not stream.task.done():
            self._ending.add(stream.task)
            stream.task.add_done_callback(self._ending.discard)

    def _outliving(self, caller: Caller, token: str) -> Caller:
        """`caller` for the stream `token`, with a deadline that does not depend on its call."""
        caller = dataclasses.replace(caller, resume_token=token, is_left=lambda: token in self._left)
        remaining_s = caller.remaining_s()
        if remaining_s is None:
            return dataclasses.replace(caller, remaining_s=lambda: None)
        loop = asyncio.get_running_loop()
        late_at = loop.time() + remaining_s
        return dataclasses.replace(caller, remaining_s=lambda: late_at - loop.time())
