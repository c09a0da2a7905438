"""Utility calls of this frontend to one engine, over its session. Knows no requests."""

from __future__ import annotations

import asyncio
import itertools

from frontend_svc.engines.connection.connection import EngineConnection
from frontend_svc.output.loss import RETRY_AFTER_MS
from triptych.engine.v1 import engine_pb2, utility_pb2
from triptych_kit.errors import DeadlineExceeded, Unavailable, from_status

# Beyond the call's own timeout, after which the engine answers by itself.
_MARGIN_S = 1.0
# The reason of the error of a call that was lost with its engine.
LOST = "ENGINE_LOST"


class EngineCalls:
    """Each call is answered once, times out, or ends with the engine."""

    def __init__(self, address: str, connection: EngineConnection) -> None:
        self._address = address
        self._connection = connection
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[utility_pb2.UtilityResult]] = {}

    async def make(self, call: utility_pb2.UtilityCall, *, timeout_s: float) -> utility_pb2.UtilityResult:
        """The result. Raises the error that the engine answers, DeadlineExceeded, or Unavailable."""
        if not self._connection.has_stream:
            raise self._lost("is not connected")
        sent = utility_pb2.UtilityCall()
        sent.CopyFrom(call)
        sent.call_id, sent.timeout_ms = next(self._ids), round(timeout_s * 1000)
        answer: asyncio.Future[utility_pb2.UtilityResult] = asyncio.get_running_loop().create_future()
        self._waiting[sent.call_id] = answer
        try:
            self._connection.send(engine_pb2.ConnectRequest(utility=sent))
            async with asyncio.timeout(timeout_s + _MARGIN_S):
                result = await answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"engine {self._address} has not answered in {timeout_s:g} s") from error
        finally:
            self._waiting.pop(sent.call_id, None)
        if result.WhichOneof("result") == "failure":
            failure = result.failure
            raise from_status(failure.code, f"engine {self._address}: {failure.message}", failure.details)
        return result

    def on_result(self, result: utility_pb2.UtilityResult) -> None:
        answer = self._waiting.get(result.call_id)
        if answer is not None and not answer.done():
            answer.set_result(result)

    def lose(self, reason: str) -> None:
        """The engine is lost: what it has not answered may have been done or not."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost(f"is lost: {reason}"))

    def _lost(self, what: str) -> Unavailable:
        return Unavailable(f"engine {self._address} {what}", reason=LOST, retry_after_ms=RETRY_AFTER_MS)
