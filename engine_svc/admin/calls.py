"""Utility calls in progress in a session or at the admin listener: a few at once, each answered once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine_svc.admin.served_engine import Role, ServedEngine
from engine_svc.admin.utility import UtilityService
from engine_svc.convert import messages
from triptych.admin.v1 import admin_pb2
from triptych.engine.v1 import utility_pb2
from triptych_kit.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError

logger = logging.getLogger(__name__)

MAX_CALLS_AT_ONCE = 4


class SessionCalls:
    """The utility calls of one frontend's session: at most MAX_CALLS_AT_ONCE, each answered once."""

    def __init__(self, engine: ServedEngine, send: Callable[[utility_pb2.UtilityResult], None]) -> None:
        self._service = UtilityService(engine)
        self._send = send
        self._tasks: dict[int, asyncio.Task[utility_pb2.UtilityResult]] = {}

    def begin(self, call: utility_pb2.UtilityCall) -> None:
        """Start `call`, or send its refusal."""
        try:
            self._service.find(call, Role.FRONTEND)
            if call.call_id in self._tasks:
                raise InvalidArgument(f"call_id {call.call_id} is in use", field="utility.call_id")
            _check_room(len(self._tasks))
        except ServiceError as error:
            self._fail(call.call_id, error)
            return
        task = asyncio.create_task(self._service.answer(call, Role.FRONTEND))
        self._tasks[call.call_id] = task
        task.add_done_callback(lambda task: self._send_answer(call.call_id, task))

    def close(self) -> None:
        """Cancel calls that have not begun, and send no more results."""
        for task in self._tasks.values():
            task.cancel()
        # `send` belongs to the session that owns this object: only a full collection would free the cycle.
        self._send = lambda result: None

    def _send_answer(self, call_id: int, task: asyncio.Task[utility_pb2.UtilityResult]) -> None:
        del self._tasks[call_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send(task.result())
        elif isinstance(error, ServiceError):
            self._fail(call_id, error)
        else:
            logger.error("utility call failed", exc_info=error)
            self._fail(call_id, Internal("internal error, see the engine's log"))

    def _fail(self, call_id: int, error: ServiceError) -> None:
        self._send(utility_pb2.UtilityResult(call_id=call_id, failure=messages.to_error_status(error)))


class AdminCalls:
    """Utility calls at the admin listener, with the admin role.

    At most MAX_CALLS_AT_ONCE that may wait for requests, and as many others.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._service = UtilityService(engine)
        self._num_calls = {True: 0, False: 0}  # key: whether the call may wait for requests

    async def serve(self, request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        """Answer one call; raises a ServiceError if it fails."""
        entry = self._service.find(request.call, Role.ADMIN)
        _check_room(self._num_calls[entry.may_wait])
        self._num_calls[entry.may_wait] += 1
        try:
            result = await self._service.answer(request.call, Role.ADMIN)
        finally:
            self._num_calls[entry.may_wait] -= 1
        logger.info("utility call served", extra={"call": entry.name})
        return admin_pb2.UtilityResponse(result=result)


def _check_room(num_calls: int) -> None:
    """Raise ResourceExhausted if MAX_CALLS_AT_ONCE calls are in progress."""
    if num_calls >= MAX_CALLS_AT_ONCE:
        raise ResourceExhausted(
            f"{num_calls} calls are in progress, the limit is {MAX_CALLS_AT_ONCE}", retry_after_ms=1000
        )
