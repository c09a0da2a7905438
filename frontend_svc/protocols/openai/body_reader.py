"""Receives the bodies of requests, whose size, time and sum are limited, and reads them in fair turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.requests import Request

from frontend_svc.protocols.openai.bodies import BodyT, IgnoredFields, read_body
from triptych_kit.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from triptych_kit.shares import FairQueue, LimitPart, SharedLimit

MAX_BODY_BYTES = 32 * 1024 * 1024
_LIMIT_S = 15.0
# Reading a smaller body takes a few milliseconds at most.
_LARGE_BYTES = 64 * 1024
# Of all large bodies that are received or read, which accounts share.
_MAX_SUM_BYTES = 256 * 1024 * 1024
# As over gRPC, where ids are read in half the time.
_MAX_FIELDS = 131_072
_MAX_NUMBERS = 1024 * 1024
_RETRY_AFTER_MS = 1000


class CheckLarge(Protocol):
    """See `TextWorkers.check_json`."""

    def __call__(self, data: bytes, *, max_fields: int, max_numbers: int) -> Awaitable[None]: ...


class BodyReader:
    """takes_unknown: unknown fields of a body are taken, without an effect."""

    def __init__(self, check_large: CheckLarge, *, takes_unknown: bool) -> None:
        self._check_large, self.takes_unknown = check_large, takes_unknown
        self._large = SharedLimit(_MAX_SUM_BYTES)
        self._turns = _Turns()  # to parse a large body

    async def read(
        self, request: Request, kind: type[BodyT], account: str, weight: int
    ) -> tuple[BodyT, IgnoredFields]:
        """The body, and the names of its fields that have no effect. account, weight: whose share it uses."""
        _check_headers(request)
        content, held = bytearray(), LimitPart(self._large, account, weight)
        try:
            try:
                async with asyncio.timeout(_LIMIT_S):
                    async for part in request.stream():
                        content += part
                        if len(content) > MAX_BODY_BYTES:
                            raise _too_large(len(content))
                        if len(content) > _LARGE_BYTES:
                            _hold(held, len(content) - held.amount)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"the body did not arrive within {_LIMIT_S:.0f} s", reason="BODY_TIME_LIMIT"
                ) from error
            whole = bytes(content)
            content.clear()
            return await self._read(whole, kind, account, weight)
        finally:
            held.clear()

    async def read_message(
        self, content: bytes, kind: type[BodyT], account: str, weight: int
    ) -> tuple[BodyT, IgnoredFields]:
        """The same for a body that is a message of a WebSocket."""
        held = LimitPart(self._large, account, weight)
        if len(content) > _LARGE_BYTES:
            _hold(held, len(content))
        try:
            return await self._read(content, kind, account, weight)
        finally:
            held.clear()

    async def _read(
        self, content: bytes, kind: type[BodyT], account: str, weight: int
    ) -> tuple[BodyT, IgnoredFields]:
        if len(content) <= _LARGE_BYTES:
            return read_body(content, kind, takes_unknown=self.takes_unknown)
        await self._check_large(content, max_fields=_MAX_FIELDS, max_numbers=_MAX_NUMBERS)
        async with self._turns.turn(account, weight):
            began_at = time.perf_counter()
            body = read_body(content, kind, takes_unknown=self.takes_unknown)
            # Streams beside it need several turns of the event loop to catch up.
            await asyncio.sleep(time.perf_counter() - began_at)
        return body


class _Turns:
    """One turn at a time, in the order of a `FairQueue`."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, account: str, weight: int) -> AsyncIterator[None]:
        """Wait for a turn, which lasts for the block."""
        if self._is_taken:
            await self._wait(account, weight)
        self._is_taken = True
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self._queue.charge(account, time.perf_counter() - began_at)
            self._pass_on()

    async def _wait(self, account: str, weight: int) -> None:
        begins = asyncio.get_running_loop().create_future()
        self._queue.add(begins, account, weight)
        try:
            await begins
        except asyncio.CancelledError:
            # It stays in the queue where it was cancelled, and is passed over.
            if not begins.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while (begins := self._queue.take()) is not None:
            if not begins.done():
                begins.set_result(None)
                return
        self._is_taken = False


def _hold(held: LimitPart, num_bytes: int) -> None:
    """Count more bytes of a large body. Raises ResourceExhausted."""
    if not held.has_room(num_bytes):
        raise ResourceExhausted(
            f"bodies of {held.shared.total} bytes are being read, the limit is {held.shared.limit}"
            f"{held.words()}",
            reason="TOO_MANY_BODIES",
            retry_after_ms=_RETRY_AFTER_MS,
        )
    held.add(num_bytes)


def _check_headers(request: Request) -> None:
    """Refuse a body before it is sent."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise InvalidArgument(
            f"content-encoding {coding} is not served: send the body as it is",
            field="content-encoding",
            reason="UNSUPPORTED_MEDIA_TYPE",
        )
    # As vLLM and OpenAI do; a client that names no type is served.
    kind = request.headers.get("content-type", "application/json")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise InvalidArgument(
            f"content-type is {kind}, must be application/json",
            field="content-type",
            reason="UNSUPPORTED_MEDIA_TYPE",
        )
    length = request.headers.get("content-length", "0")
    if int(length) > MAX_BODY_BYTES:  # h11 has checked that it is a number of 20 digits at most
        raise _too_large(int(length))


def _too_large(size: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"the body has {size} bytes or more, the limit is {MAX_BODY_BYTES}", reason="BODY_TOO_LARGE"
    )
