"""Adapters that are loaded and unloaded while engines run: on all engines of a model or on none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from frontend_svc.engines.connection.calls import LOST
from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.engines.directory import Directory
from frontend_svc.output.loss import RETRY_AFTER_MS
from frontend_svc.text.limits import Violations
from triptych.engine.v1 import utility_pb2
from triptych_kit.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from triptych_kit.rules import MessageRules

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]*")
_RULES = MessageRules(utility_pb2.AddAdapterCall)
# Changes that wait for the one in progress.
_MAX_WAITING = 64
# Names whose last change is repeated at an engine that returns.
_MAX_REPEATED = 4096
# Reading and checking the files of an adapter.
_CALL_S = 60.0
# From the answer of an engine until what it announces then is read.
_ANNOUNCED_S = 5.0

_Results = dict[EngineClient, utility_pb2.UtilityResult | ServiceError]


class AdapterAnswers:
    """Changes one adapter at a time. Call `engines_changed` after each change of an engine.

    An engine that comes later, or was out of reach, gets the changes that were made by this frontend; it is
    used meanwhile, for requests without what it lacks.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._paths: dict[tuple[str, str], str] = {}  # by model and name; empty: it is unloaded
        self._epochs: dict[str, int] = {}  # of the engine processes that are ready, by address
        self._announced = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str, *, model: str = "", replaces: bool = False) -> None:
        """Load the adapter in folder `path` of every engine under `name`.

        model: its base, if several are served.  Raises InvalidArgument, AlreadyExists, Unavailable and the
        errors of engines; then no engine has it. A caller that is cancelled does not stop it.
        """
        violations = Violations()
        violations.extend(_RULES.violations(_add(name, path, replaces=replaces).add_adapter, {}))
        violations.need(
            _NAME.fullmatch(name) is not None, "name", name, "must have only A-Z, a-z, 0-9, '.', '_' and '-'"
        )
        violations.raise_if_any()
        base = self._directory.model(model).name
        for of, served in self._directory.models().items():
            if name in (of, *self._directory.aliases_of(of)):
                raise AlreadyExists(f"name is {name!r}, which is that of a model")
            if of != base and name in served.variants:
                raise AlreadyExists(f"name is {name!r}, which is that of an adapter of model {of!r}")
        await self._in_turn(self._load(base, name, path, replaces=replaces))

    async def unload(self, name: str, *, model: str = "") -> None:
        """Have every engine forget the adapter; running requests keep it. Raises NotFound, as `load` else."""
        base = self._directory.model(model).name
        await self._in_turn(self._unload(base, name))

    def engines_changed(self) -> None:
        """Repeat the changes at engine processes that were not there when they were made."""
        self._announced.set()
        ready = [each for each in self._directory.clients() if each.state is EngineState.READY]
        known, self._epochs = self._epochs, {each.address: each.engine_epoch for each in ready}
        for client in ready:
            if known.get(client.address) != client.engine_epoch and self._paths:
                self._begin(self._repeat(client))

    async def _in_turn(self, change: Coroutine[Any, Any, None]) -> None:
        if self._num_waiting >= _MAX_WAITING:
            change.close()
            raise ResourceExhausted(
                f"{self._num_waiting} changes of adapters wait already, the limit is {_MAX_WAITING}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._num_waiting += 1
        task = self._begin(change)
        task.add_done_callback(self._count_down)
        await asyncio.shield(task)

    def _count_down(self, task: asyncio.Task[None]) -> None:
        self._num_waiting -= 1
        if not task.cancelled():
            # Its caller may be gone.
            task.exception()

    def _begin(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._alone(change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _alone(self, change: Coroutine[Any, Any, None]) -> None:
        async with self._turn:
            await change

    async def _load(self, model: str, name: str, path: str, *, replaces: bool) -> None:
        engines = self._engines(model)
        if not engines:
            raise Unavailable(f"no engine of model {model!r} is ready", retry_after_ms=RETRY_AFTER_MS)
        before = {engine: _digest_at(engine, name) for engine in engines}
        results = await _on_all(engines, _add(name, path, replaces=replaces))
        digests = {
            adapter.digest
            for result in results.values()
            if isinstance(result, utility_pb2.UtilityResult)
            for adapter in result.adapters.adapters
        }
        error = _first_error(results, lambda engine, error: _is_same(error, before[engine], digests))
        if error is None and len(digests) > 1:
            error = FailedPrecondition(f"engines have different files at {path}", reason="ADAPTERS_DIFFER")
        if error is not None:
            changed = [engine for engine in _maybe_done(results) if before[engine] not in digests]
            await self._undo(model, name, changed, before)
            raise error
        self._note(model, name, path)

        def is_announced(engine: EngineClient) -> bool:
            digest = _digest_at(engine, name)
            return digest in digests if digests else bool(digest)

        await self._until(lambda: all(map(is_announced, _done(results))))

    async def _unload(self, model: str, name: str) -> None:
        engines = [engine for engine in self._engines(model) if _digest_at(engine, name)]
        if not engines:
            raise NotFound(
                f"adapter {name!r:.80} of model {model!r} is not loaded",
                resource_type="adapter",
                resource_name=name[:80],
                metadata={"fields": "name"},
            )
        before = {engine: _digest_at(engine, name) for engine in engines}
        results = await _on_all(engines, _remove(name))
        error = _first_error(results, lambda engine, error: isinstance(error, NotFound))
        if error is not None:
            await self._undo(model, name, _maybe_done(results), before)
            raise error
        self._note(model, name, "")
        await self._until(lambda: not any(_digest_at(one, name) for one in _done(results)))

    async def _repeat(self, client: EngineClient) -> None:
        model = client.model
        others = [] if model is None else [one for one in self._engines(model.name) if one is not client]
        for (of, name), path in list(self._paths.items()):
            if model is None or of != model.name:
                continue
            digest = _digest_at(client, name)
            wanted = {_digest_at(one, name) for one in others} - {""}
            if path and (not digest or (wanted and digest not in wanted)):
                await self._try(client, _add(name, path, replaces=bool(digest)))
            elif not path and digest and not wanted:
                await self._try(client, _remove(name))

    async def _undo(
        self, model: str, name: str, engines: Sequence[EngineClient], before: dict[EngineClient, str]
    ) -> None:
        """Have `engines` serve what they served `before` the change."""
        path = self._paths.get((model, name), "")
        for engine in engines:
            if not before[engine]:
                await self._try(engine, _remove(name))
            elif path:
                await self._try(engine, _add(name, path, replaces=True))
            else:
                logger.warning(
                    "an adapter's change cannot be undone: its former folder is not known",
                    extra={"engine": engine.address, "adapter": name},
                )

    async def _try(self, engine: EngineClient, call: utility_pb2.UtilityCall) -> None:
        try:
            await engine.calls.make(call, timeout_s=_CALL_S)
        except ServiceError as error:
            logger.warning(
                "an adapter could not be changed",
                extra={"engine": engine.address, "call": call.WhichOneof("call"), "reason": error.message},
            )

    def _engines(self, model: str) -> list[EngineClient]:
        return [
            client
            for client in self._directory.clients()
            if client.state is EngineState.READY and client.model is not None and client.model.name == model
        ]

    def _note(self, model: str, name: str, path: str) -> None:
        self._paths.pop((model, name), None)
        self._paths[model, name] = path
        while len(self._paths) > _MAX_REPEATED:
            self._paths.pop(next(iter(self._paths)))
        logger.info(
            "adapter loaded" if path else "adapter unloaded",
            extra={"model": model, "adapter": name, "path": path},
        )

    async def _until(self, is_announced: Callable[[], bool]) -> None:
        """Wait until the next request finds the change; not for long, as engines may be lost meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANNOUNCED_S):
                while not is_announced():
                    self._announced.clear()
                    await self._announced.wait()


def _digest_at(engine: EngineClient, name: str) -> str:
    """What `name` stands for at an engine, as it has announced; empty: nothing."""
    return "" if engine.model is None else engine.model.variants.get(name, "")


def _add(name: str, path: str, *, replaces: bool) -> utility_pb2.UtilityCall:
    added = utility_pb2.AddAdapterCall(name=name, path=path, replace=replaces)
    return utility_pb2.UtilityCall(add_adapter=added)


def _remove(name: str) -> utility_pb2.UtilityCall:
    return utility_pb2.UtilityCall(remove_adapter=utility_pb2.RemoveAdapterCall(name=name))


async def _on_all(engines: Sequence[EngineClient], call: utility_pb2.UtilityCall) -> _Results:
    async def make(engine: EngineClient) -> utility_pb2.UtilityResult | ServiceError:
        try:
            return await engine.calls.make(call, timeout_s=_CALL_S)
        except ServiceError as error:
            return error

    return dict(zip(engines, await asyncio.gather(*map(make, engines)), strict=True))


def _done(results: _Results) -> list[EngineClient]:
    return [engine for engine, result in results.items() if not isinstance(result, ServiceError)]


def _maybe_done(results: _Results) -> list[EngineClient]:
    """Also those that have not answered in time."""
    late = [engine for engine, result in results.items() if isinstance(result, DeadlineExceeded)]
    return [*_done(results), *late]


def _first_error(
    results: _Results, is_harmless: Callable[[EngineClient, ServiceError], bool]
) -> ServiceError | None:
    """The error for the caller. An engine that is lost gets the change when it returns, if another has it."""
    errors = {
        engine: result
        for engine, result in results.items()
        if isinstance(result, ServiceError) and not is_harmless(engine, result)
    }
    serious = [error for error in errors.values() if error.reason != LOST]
    if serious or len(errors) == len(results):
        return [*serious, *errors.values()][0]
    return None


def _is_same(error: ServiceError, digest: str, digests: set[str]) -> bool:
    """Whether an engine refuses to load what it has already."""
    return isinstance(error, AlreadyExists) and digest in digests
