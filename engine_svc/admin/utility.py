"""Utility calls: operations on an engine other than requests, with the role and the deadline of each.

A call is a field of the proto's oneof and has one handler here; no attribute is looked up by its name.
Changes to the engine run on its thread, between two steps. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.core.control import WakeTag
from engine_svc.loop.answer import give
from engine_svc.loop.mailbox import Call
from engine_svc.loop.pause import PauseMode, RunState
from service_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PermissionDenied,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from triptych.engine.v1 import utility_pb2

if TYPE_CHECKING:
    from engine_svc.loop.controls import EngineControls

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_MS = 60_000
MAX_TIMEOUT_MS = 3_600_000
# How often a waiting call checks whether the engine has ended.
_LOOK_S = 0.5
_MAX_VERSION_CHARACTERS = 256

_MODES: dict[utility_pb2.PauseMode, PauseMode] = {
    utility_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    utility_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    utility_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_TAGS = {tag.value: tag for tag in WakeTag}


class Role(Enum):
    """Role of a caller. Derived from the listener that received the call, never from its content."""

    FRONTEND = "frontend"
    ADMIN = "admin"


class UtilityService:
    """Serves the calls to one engine."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def check(self, call: utility_pb2.UtilityCall, role: Role) -> None:
        """Raise Unimplemented for an unknown call, PermissionDenied for one that `role` may not make."""
        name = call.WhichOneof("call")
        entry = _ENTRIES.get(name or "")
        if entry is None:
            raise Unimplemented(
                f"call {name or 'unknown'} is not served by this engine", reason="CALL_NOT_SERVED"
            )
        if entry.role is Role.ADMIN and role is not Role.ADMIN:
            raise PermissionDenied(
                f"call {name} needs the admin role: make it at the engine's admin listener",
                reason="ADMIN_ONLY",
            )

    async def answer(self, call: utility_pb2.UtilityCall, role: Role) -> utility_pb2.UtilityResult:
        """Run `call`. Raises a ServiceError that names it. Cancelling prevents a call that has not begun."""
        self.check(call, role)
        name = str(call.WhichOneof("call"))
        timeout_ms = call.timeout_ms if call.HasField("timeout_ms") else DEFAULT_TIMEOUT_MS
        try:
            result = await _ENTRIES[name].handler(self, call, min(timeout_ms, MAX_TIMEOUT_MS) / 1000)
        except ServiceError as error:
            error.message = f"call to {name} failed: {error.message}"
            error.args = (error.message,)
            raise
        result.call_id = call.call_id
        return result

    async def _get_supported_tasks(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        tasks = utility_pb2.SupportedTasks(tasks=self._core().facts.supported_tasks)
        return utility_pb2.UtilityResult(supported_tasks=tasks)

    async def _pause(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        mode, clear_cache = _mode(call.pause.mode, "pause.mode"), call.pause.clear_cache

        def work(controls: EngineControls, answer: Future[None]) -> None:
            controls.pause_controller.pause(mode, answer, clear_cache=clear_cache)

        await self._deferred(work, timeout_s)
        return _done()

    async def _resume(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        await self._ask(lambda controls: controls.pause_controller.resume(), timeout_s)
        return _done()

    async def _is_paused(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        return utility_pb2.UtilityResult(is_paused=self._controls().pause_controller.is_paused)

    async def _sleep(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        level = call.sleep.level
        mode = _mode(call.sleep.mode, "sleep.mode", default=PauseMode.ABORT)

        def work(controls: EngineControls, answer: Future[None]) -> None:
            controls.pause_controller.sleep(level, mode, answer)

        await self._deferred(work, timeout_s)
        return _done()

    async def _wake(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        unknown = [tag for tag in call.wake.tags if tag not in _TAGS]
        if unknown:
            raise InvalidArgument(f"tag {unknown[0]!r} is none of {', '.join(_TAGS)}", field="wake.tags")
        tags = {_TAGS[tag] for tag in call.wake.tags} or frozenset(WakeTag)
        await self._ask(lambda controls: controls.pause_controller.wake(tags), timeout_s)
        return _done()

    async def _is_sleeping(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        is_sleeping = self._controls().pause_controller.state is RunState.ASLEEP
        return utility_pb2.UtilityResult(is_sleeping=is_sleeping)

    async def _reset_prefix_cache(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        if call.reset_prefix_cache.reset_connector:
            raise FailedPrecondition("this engine has no KV connector to reset", reason="NO_CONNECTOR")
        reset_running = call.reset_prefix_cache.reset_running
        await self._ask(lambda controls: controls.reset_prefix_cache(reset_running=reset_running), timeout_s)
        return utility_pb2.UtilityResult(reset_prefix_cache=True)

    async def _profile(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        prefix = call.profile.prefix
        if call.profile.start:
            await self._ask(lambda controls: controls.start_profile(prefix), timeout_s)
            return _done()
        if prefix:
            raise InvalidArgument("the prefix of a profile is set when it starts", field="profile.prefix")
        await self._ask(lambda controls: controls.stop_profile(), timeout_s)
        return _done()

    async def _collective(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        function = _COLLECTIVES.get(call.collective.name)
        if function is None:
            raise Unimplemented(f"the only collectives are {', '.join(_COLLECTIVES)}")
        if call.collective.arguments:
            raise InvalidArgument("this collective takes no arguments", field="collective.arguments")
        ranks = await self._ask(function, timeout_s)
        return utility_pb2.UtilityResult(
            collective=utility_pb2.CollectiveResult(ranks=[str(value) for value in ranks])
        )

    async def _get_weight_version(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        return utility_pb2.UtilityResult(weight_version=self._controls().weight_version)

    async def _set_weight_version(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        version = _version(call.set_weight_version.version, "set_weight_version.version")
        await self._ask(lambda controls: controls.set_weight_version(version), timeout_s)
        return _done()

    async def _update_weights(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        update = call.update_weights
        if update.names:
            raise Unimplemented("single tensors cannot be replaced, only all of a folder", reason="NAMES")
        folder = Path(update.path) if update.path else None
        version = _version(update.version, "update_weights.version")
        await self._ask(lambda controls: controls.update_weights(folder, version), timeout_s)
        return _done()

    async def _get_config(self, call: utility_pb2.UtilityCall, timeout_s: float) -> utility_pb2.UtilityResult:
        options = utility_pb2.EngineOptions(
            options=[
                utility_pb2.EngineOption(name=option.name, value=option.value, origin=option.origin)
                for option in self._engine.options
            ]
        )
        return utility_pb2.UtilityResult(config=options)

    async def _get_statistics(
        self, call: utility_pb2.UtilityCall, timeout_s: float
    ) -> utility_pb2.UtilityResult:
        return utility_pb2.UtilityResult(statistics=announce.stats(self._engine.stats_snapshot.read()))

    async def _ask(self, work: Callable[[EngineControls], T], timeout_s: float) -> T:
        """Run `work` on the engine thread and return its result."""
        return await self._deferred(lambda controls, answer: give(answer, lambda: work(controls)), timeout_s)

    async def _deferred(self, work: Callable[[EngineControls, Future[T]], None], timeout_s: float) -> T:
        """Start `work` on the engine thread and wait for the answer, which it may give later."""
        state = self._engine.lifecycle.state
        if state is not EngineState.READY:
            raise Unavailable(f"engine is {state.value}", reason=f"ENGINE_{state.name}")
        controls = self._controls()
        answer: Future[T] = Future()
        self._engine.inbox.put(Call(lambda: controls.serve(lambda: work(controls, answer))))
        wrapped = asyncio.wrap_future(answer)
        until = asyncio.get_running_loop().time() + timeout_s
        try:
            while not answer.done() and not self._engine.lifecycle.has_ended:
                left_s = until - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                await asyncio.wait((wrapped,), timeout=min(left_s, _LOOK_S))
        finally:
            # A call that has not begun never will; one that waits for requests to end is dropped.
            if answer.cancel():
                self._engine.inbox.put(Call(lambda: controls.serve(controls.pause_controller.drop_cancelled)))
            wrapped.cancel()
        return self._result_of(answer, timeout_s)

    def _result_of(self, answer: Future[T], timeout_s: float) -> T:
        if self._engine.lifecycle.has_ended and (answer.cancelled() or not answer.done()):
            raise Unavailable("the engine has ended", reason="ENGINE_DEAD")
        if answer.cancelled():
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s; nothing was changed")
        if not answer.done():
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s; it has begun and will take effect")
        error = answer.exception()
        if error is None:
            return answer.result()
        if isinstance(error, ServiceError):
            raise error
        logger.error("utility call failed", exc_info=error)
        raise Internal("internal error, see the engine's log")

    def _core(self) -> LoadedCore:
        core = self._engine.core
        if core is None:
            raise Unavailable("engine is loading", reason="ENGINE_LOADING")
        return core

    def _controls(self) -> EngineControls:
        controls = self._core().controls
        if controls is None:
            raise Unimplemented("this engine is stepped by its caller and takes no utility calls")
        return controls


@dataclass(frozen=True, slots=True)
class _Entry:
    """How a call is served. Arguments of the handler: the service, the call, its timeout in seconds."""

    handler: Callable[[UtilityService, utility_pb2.UtilityCall, float], Awaitable[utility_pb2.UtilityResult]]
    role: Role


# Calls of the proto that are missing here are not implemented. Unbound functions: bound methods kept in a
# UtilityService, of which each session has one, would be a reference cycle.
_ENTRIES: dict[str, _Entry] = {
    "get_supported_tasks": _Entry(UtilityService._get_supported_tasks, Role.FRONTEND),
    "pause": _Entry(UtilityService._pause, Role.ADMIN),
    "resume": _Entry(UtilityService._resume, Role.ADMIN),
    "is_paused": _Entry(UtilityService._is_paused, Role.FRONTEND),
    "sleep": _Entry(UtilityService._sleep, Role.ADMIN),
    "wake": _Entry(UtilityService._wake, Role.ADMIN),
    "is_sleeping": _Entry(UtilityService._is_sleeping, Role.FRONTEND),
    "reset_prefix_cache": _Entry(UtilityService._reset_prefix_cache, Role.ADMIN),
    "profile": _Entry(UtilityService._profile, Role.ADMIN),
    "collective": _Entry(UtilityService._collective, Role.ADMIN),
    "get_weight_version": _Entry(UtilityService._get_weight_version, Role.FRONTEND),
    "set_weight_version": _Entry(UtilityService._set_weight_version, Role.ADMIN),
    "update_weights": _Entry(UtilityService._update_weights, Role.ADMIN),
    "get_config": _Entry(UtilityService._get_config, Role.FRONTEND),
    "get_statistics": _Entry(UtilityService._get_statistics, Role.FRONTEND),
}
# Functions that run on every rank, by name.
_COLLECTIVES: dict[str, Callable[[EngineControls], list[int]]] = {
    "memory": lambda controls: controls.num_bytes_in_use()
}


def _mode(value: utility_pb2.PauseMode, field: str, default: PauseMode | None = None) -> PauseMode:
    mode = default if value == utility_pb2.PAUSE_MODE_UNSPECIFIED else _MODES.get(value)
    if mode is None:
        raise InvalidArgument(f"mode is {value}, it has to be ABORT, WAIT or KEEP", field=field)
    return mode


def _version(text: str, field: str) -> str:
    if len(text) > _MAX_VERSION_CHARACTERS:
        raise InvalidArgument(
            f"version has {len(text)} characters, the limit is {_MAX_VERSION_CHARACTERS}", field=field
        )
    return text


def _done() -> utility_pb2.UtilityResult:
    return utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())
