"""Utility calls: operations on an engine other than requests, with the role and the deadline of each.

A call is a field of the proto's oneof and is served if an entry is registered for it: those of the engine are
ENGINE_CALLS, features add theirs when the engine is built. No attribute is looked up by its name. Changes to
the engine run on its thread, between two steps. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from engine_svc.admin import announce
from engine_svc.admin.served_engine import CallContext, Role, ServedEngine, UtilityCall
from engine_svc.core.control import WakeTag
from engine_svc.loop.pause import PauseMode, RunState
from triptych.engine.v1 import utility_pb2
from triptych_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ServiceError,
    Unimplemented,
)
from triptych_kit.field_checks import check_enum
from triptych_kit.rules import rules_of

if TYPE_CHECKING:
    from engine_svc.loop.controls import EngineControls

DEFAULT_TIMEOUT_MS = 60_000
_MAX_TIMEOUT_MS = int(rules_of(utility_pb2.UtilityCall, "timeout_ms").lowered_to)
DEFAULT_SLEEP_LEVEL = 1
_SHOWN_CHARACTERS = 200
_MAX_VERSION_CHARACTERS = rules_of(utility_pb2.SetWeightVersionCall, "version").max_chars

_MODES: dict[utility_pb2.PauseMode, PauseMode] = {
    utility_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.ABORT,
    utility_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    utility_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    utility_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}
_VALUES: dict[str, Callable[[utility_pb2.CollectiveArgument], object]] = {
    "text": lambda argument: argument.text,
    "integer": lambda argument: argument.integer,
    "number": lambda argument: argument.number,
    "flag": lambda argument: argument.flag,
}
_TAGS = {tag.value: tag for tag in WakeTag}
_NAMES = frozenset(field.name for field in utility_pb2.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields)


def registered(calls: Iterable[UtilityCall]) -> Mapping[str, UtilityCall]:
    """The calls by name. Raises ValueError for one that the proto lacks or that is registered twice."""
    by_name: dict[str, UtilityCall] = {}
    for call in calls:
        if call.name not in _NAMES:
            raise ValueError(f"utility call {call.name!r} is no field of the proto's UtilityCall.call")
        if call.name in by_name:
            raise ValueError(f"utility call {call.name!r} is registered twice")
        by_name[call.name] = call
    return by_name


class UtilityService:
    """Serves the calls to one engine."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def find(self, call: utility_pb2.UtilityCall, role: Role) -> UtilityCall:
        """The entry of a call. Unimplemented if it has none, PermissionDenied if `role` may not make it."""
        name = call.WhichOneof("call")
        entry = self._engine.utilities.get(name or "")
        if entry is None:
            raise Unimplemented(
                f"call {name or 'unknown'} is not served by this engine", reason="CALL_NOT_SERVED"
            )
        if entry.role is Role.ADMIN and role is not Role.ADMIN:
            raise PermissionDenied(
                f"call {name} needs the admin role: make it at the engine's admin listener",
                reason="ADMIN_ONLY",
            )
        return entry

    async def answer(self, call: utility_pb2.UtilityCall, role: Role) -> utility_pb2.UtilityResult:
        """Run `call`. Raises a ServiceError that names it. Cancelling prevents a call that has not begun."""
        entry = self.find(call, role)
        timeout_ms = call.timeout_ms if call.HasField("timeout_ms") else DEFAULT_TIMEOUT_MS
        context = CallContext(self._engine, min(timeout_ms, _MAX_TIMEOUT_MS) / 1000)
        try:
            result = await entry.handler(context, call)
        except ServiceError as error:
            error.message = f"call to {entry.name} failed: {error.message}"
            error.args = (error.message,)
            raise
        result.call_id = call.call_id
        return result


async def _get_supported_tasks(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    tasks = utility_pb2.SupportedTasks(tasks=context.core.facts.supported_tasks)
    return utility_pb2.UtilityResult(supported_tasks=tasks)


async def _pause(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    mode = _mode(call.pause.mode, "pause.mode")
    clear_cache = call.pause.clear_cache if call.pause.HasField("clear_cache") else True

    def work(controls: EngineControls, answer: Future[None]) -> None:
        controls.pause_controller.pause(mode, answer, clear_cache=clear_cache)

    await context.deferred(work)
    return _done()


async def _resume(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    await context.ask(lambda controls: controls.pause_controller.resume())
    return _done()


async def _is_paused(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    return utility_pb2.UtilityResult(is_paused=context.controls.pause_controller.is_paused)


async def _sleep(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    level = call.sleep.level if call.sleep.HasField("level") else DEFAULT_SLEEP_LEVEL
    mode = _mode(call.sleep.mode, "sleep.mode")

    def work(controls: EngineControls, answer: Future[None]) -> None:
        controls.pause_controller.sleep(level, mode, answer)

    await context.deferred(work)
    return _done()


async def _wake(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    unknown = [tag for tag in call.wake.tags if tag not in _TAGS]
    if unknown:
        raise InvalidArgument(f"tag {unknown[0]!r} is none of {', '.join(_TAGS)}", field="wake.tags")
    tags = {_TAGS[tag] for tag in call.wake.tags} or frozenset(WakeTag)
    await context.ask(lambda controls: controls.pause_controller.wake(tags))
    return _done()


async def _is_sleeping(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    is_sleeping = context.controls.pause_controller.state is RunState.ASLEEP
    return utility_pb2.UtilityResult(is_sleeping=is_sleeping)


async def _reset_prefix_cache(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    if call.reset_prefix_cache.reset_connector:
        raise FailedPrecondition("this engine has no KV connector to reset", reason="NO_CONNECTOR")
    reset_running = call.reset_prefix_cache.reset_running
    await context.ask(lambda controls: controls.reset_prefix_cache(reset_running=reset_running))
    return utility_pb2.UtilityResult(reset_prefix_cache=True)


async def _profile(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    prefix = call.profile.prefix
    if call.profile.start:
        await context.ask(lambda controls: controls.start_profile(prefix))
        return _done()
    if prefix:
        raise InvalidArgument("the prefix of a profile is set when it starts", field="profile.prefix")
    await context.ask(lambda controls: controls.stop_profile())
    return _done()


async def _execute_dummy_batch(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    await context.ask(lambda controls: controls.execute_dummy_batch())
    return _done()


async def _collective(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    name, arguments = call.collective.name, _arguments(call.collective.arguments)
    ranks = await context.ask(lambda controls: controls.run_collective(name, arguments))
    return utility_pb2.UtilityResult(collective=utility_pb2.CollectiveResult(ranks=ranks))


async def _get_weight_version(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    return utility_pb2.UtilityResult(weight_version=context.controls.weight_version)


async def _set_weight_version(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    version = _version(call.set_weight_version.version, "set_weight_version.version")
    await context.ask(lambda controls: controls.set_weight_version(version))
    return _done()


async def _update_weights(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    update = call.update_weights
    if len(update.names) != len(set(update.names)):
        raise InvalidArgument("a name occurs twice", field="update_weights.names")
    folder = Path(update.path) if update.path else None
    version, names = _version(update.version, "update_weights.version"), list(update.names)
    await context.ask(lambda controls: controls.update_weights(folder, version, names))
    return _done()


async def _save_sharded_state(
    context: CallContext, call: utility_pb2.UtilityCall
) -> utility_pb2.UtilityResult:
    asked = call.save_sharded_state
    if not Path(asked.path).is_absolute():
        raise InvalidArgument(
            f"path is {asked.path[:_SHOWN_CHARACTERS]!r}, it has to be a folder from the root on",
            field="save_sharded_state.path",
        )
    if asked.pattern or asked.max_size_bytes:
        field = "pattern" if asked.pattern else "max_size_bytes"
        raise InvalidArgument(
            f"{field} is not taken: each rank writes one file, by whose name a start finds it",
            field=f"save_sharded_state.{field}",
        )
    await context.ask(lambda controls: controls.save_weights(Path(asked.path)))
    return _done()


async def _get_config(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    options = utility_pb2.EngineOptions(
        options=[
            utility_pb2.EngineOption(name=option.name, value=option.value, origin=option.origin)
            for option in context.engine.options
        ]
    )
    return utility_pb2.UtilityResult(config=options)


async def _get_statistics(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    return utility_pb2.UtilityResult(statistics=announce.stats(context.engine.stats_snapshot.read()))


ENGINE_CALLS = (
    UtilityCall("get_supported_tasks", Role.FRONTEND, _get_supported_tasks),
    UtilityCall("pause", Role.ADMIN, _pause, may_wait=True),
    UtilityCall("resume", Role.ADMIN, _resume),
    UtilityCall("is_paused", Role.FRONTEND, _is_paused),
    UtilityCall("sleep", Role.ADMIN, _sleep, may_wait=True),
    UtilityCall("wake", Role.ADMIN, _wake),
    UtilityCall("is_sleeping", Role.FRONTEND, _is_sleeping),
    UtilityCall("reset_prefix_cache", Role.ADMIN, _reset_prefix_cache),
    UtilityCall("profile", Role.ADMIN, _profile),
    UtilityCall("execute_dummy_batch", Role.ADMIN, _execute_dummy_batch),
    UtilityCall("collective", Role.ADMIN, _collective),
    UtilityCall("get_weight_version", Role.FRONTEND, _get_weight_version),
    UtilityCall("set_weight_version", Role.ADMIN, _set_weight_version),
    UtilityCall("update_weights", Role.ADMIN, _update_weights),
    UtilityCall("save_sharded_state", Role.ADMIN, _save_sharded_state),
    UtilityCall("get_config", Role.FRONTEND, _get_config),
    UtilityCall("get_statistics", Role.FRONTEND, _get_statistics),
)


def _mode(value: utility_pb2.PauseMode, field: str) -> PauseMode:
    check_enum(value, field, utility_pb2.PauseMode, _MODES)
    return _MODES[value]


def _version(text: str, field: str) -> str:
    if len(text) > _MAX_VERSION_CHARACTERS:
        raise InvalidArgument(
            f"version has {len(text)} characters, the limit is {_MAX_VERSION_CHARACTERS}", field=field
        )
    return text


def _arguments(arguments: Iterable[utility_pb2.CollectiveArgument]) -> dict[str, object]:
    values: dict[str, object] = {}
    for argument in arguments:
        kind = argument.WhichOneof("value")
        if kind is None:
            raise InvalidArgument("an argument has no value", field="collective.arguments")
        if argument.name in values:
            raise InvalidArgument("an argument occurs twice", field="collective.arguments")
        values[argument.name] = _VALUES[kind](argument)
    return values


def _done() -> utility_pb2.UtilityResult:
    return utility_pb2.UtilityResult(done=utility_pb2.UtilityDone())
