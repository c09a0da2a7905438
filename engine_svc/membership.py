"""The engine's membership at the coordinator: registration and reports up, commands down, for ever.

The engine works without it: a coordinator that is away costs one log line and is looked for again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import grpc
import grpc.aio

from engine_svc import convert
from engine_svc.lifecycle import EngineState
from engine_svc.served_engine import ServedEngine
from service_kit.channel import open_channel
from service_kit.errors import Unimplemented
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.1
# An engine without work has little to tell, and idle processes should stay idle.
_IDLE_INTERVAL_S = 0.5
_RENEW_AFTER_S = 1.0  # until the coordinator names its own
_HANDSHAKE_S = 10.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_GOODBYE_S = 1.0

_STATES = {
    EngineState.LOADING: member_pb2.MEMBER_STATE_LOADING,
    EngineState.READY: member_pb2.MEMBER_STATE_READY,
    EngineState.DRAINING: member_pb2.MEMBER_STATE_DRAINING,
    EngineState.STOPPED: member_pb2.MEMBER_STATE_DRAINING,
    EngineState.FAILED: member_pb2.MEMBER_STATE_FAILED,
}

_Request: TypeAlias = coordinator_pb2.EngineSessionRequest
_Response: TypeAlias = coordinator_pb2.EngineSessionResponse
_Call: TypeAlias = "grpc.aio.StreamStreamCall[_Request, _Response]"


class Membership:
    """Keeps one engine registered. `stop_engine` is what a drain command calls."""

    def __init__(
        self, engine: ServedEngine, *, coordinator: str, endpoint: str, stop_engine: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._coordinator = coordinator
        self._endpoint = endpoint
        self._stop_engine = stop_engine
        self._interval_s = _REPORT_INTERVAL_S
        self._renew_after_s = _RENEW_AFTER_S
        self._seq = 0
        self._is_member = False
        self._writing = asyncio.Lock()  # a stream takes one write at a time
        self._state_changed = asyncio.Event()
        engine.lifecycle.subscribe(lambda state: self._state_changed.set())

    @property
    def is_member(self) -> bool:
        """Whether a coordinator has taken the registration and its session stands."""
        return self._is_member

    async def run(self) -> None:
        """Stay registered until cancelled, or until the engine has ended."""
        retry_s = _FIRST_RETRY_S
        has_complained = False
        async with open_channel(self._coordinator) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while not self._engine.lifecycle.has_ended:
                try:
                    await self._hold_session(stub)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                    # Once, or an engine without its coordinator would fill the log.
                    if self._is_member or not has_complained:
                        logger.warning("coordinator is away", extra={"cause": _cause(error)})
                        has_complained = True
                if self._is_member:
                    retry_s = _FIRST_RETRY_S
                self._is_member = False
                # Jitter, so that a fleet does not come back as one.
                await self._pause(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _hold_session(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        """Register and report until the stream breaks or the engine has ended."""
        call = stub.EngineSession()
        try:
            await call.write(_Request(register=self._registration()))
            responses = aiter(call)
            async with asyncio.timeout(_HANDSHAKE_S):
                answer = await anext(responses, None)
            if answer is None:
                return
            self._take_registered(answer)
            commands = asyncio.create_task(self._obey(call, responses))
            try:
                await self._report_until_done(call, commands)
            finally:
                commands.cancel()
        finally:
            call.cancel()

    async def _report_until_done(self, call: _Call, commands: asyncio.Task[None]) -> None:
        reported: coordinator_pb2.EngineReport | None = None
        registered = self._registration()
        quiet_s = 0.0
        while not commands.done():
            registration = self._registration()
            if registration != registered:
                await self._write(call, _Request(register=registration))
                registered = registration
            report = self._report()
            if report != reported or quiet_s >= self._renew_after_s:
                self._seq += 1
                numbered = coordinator_pb2.EngineReport(seq=self._seq)
                numbered.MergeFrom(report)
                await self._write(call, _Request(report=numbered))
                reported, quiet_s = report, 0.0
            if self._engine.lifecycle.has_ended:
                await self._say_goodbye(call, commands)
                return
            has_work = self._engine.board.read().has_work
            interval_s = self._interval_s if has_work else max(self._interval_s, _IDLE_INTERVAL_S)
            await self._pause(interval_s)
            quiet_s += interval_s
        await commands

    async def _say_goodbye(self, call: _Call, commands: asyncio.Task[None]) -> None:
        if self._engine.lifecycle.state is EngineState.STOPPED:
            goodbye = coordinator_pb2.EngineGoodbye(reason="drained")
            await self._write(call, _Request(goodbye=goodbye))
        await call.done_writing()
        # The coordinator ends the stream when it has read the last word.
        await asyncio.wait({commands}, timeout=_GOODBYE_S)

    async def _obey(self, call: _Call, responses: AsyncIterator[_Response]) -> None:
        async for message in responses:
            match message.WhichOneof("message"):
                case "registered":
                    self._take_registered(message)
                case "command":
                    result = self._do(message.command)
                    await self._write(call, _Request(command_result=result))
                case kind:
                    logger.info("unknown message ignored", extra={"kind": str(kind)})

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the engine's state changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._state_changed.wait()
        self._state_changed.clear()

    async def _write(self, call: _Call, message: _Request) -> None:
        async with self._writing:
            await call.write(message)

    def _do(self, command: command_pb2.Command) -> command_pb2.CommandResult:
        result = command_pb2.CommandResult(command_id=command.command_id)
        match command.WhichOneof("command"):
            case "drain":
                logger.info("coordinator asks to drain")
                self._stop_engine()
                result.ack.SetInParent()
            case "update_interval":
                self._interval_s = max(_REPORT_INTERVAL_S, command.update_interval.interval_ms / 1000)
                result.ack.SetInParent()
            case kind:
                error = Unimplemented(f"command {kind or 'unknown'} is not obeyed by this engine")
                result.nack.CopyFrom(convert.to_error_status(error))
        return result

    def _take_registered(self, message: _Response) -> None:
        registered = message.registered
        if registered.renew_after_ms:
            self._renew_after_s = registered.renew_after_ms / 1000
        if not self._is_member:
            self._is_member = True
            logger.info("registered at the coordinator", extra={"lease_ms": registered.lease_ms})

    def _registration(self) -> member_pb2.EngineRegistration:
        identity, core = self._engine.identity, self._engine.core
        registration = member_pb2.EngineRegistration(
            engine_id=identity.engine_id,
            engine_epoch=identity.engine_epoch,
            dp_rank=identity.dp_rank,
            dp_size=identity.dp_size,
            endpoint=self._endpoint,
        )
        if core is not None:
            facts = core.facts
            registration.fingerprint = facts.fingerprint.digest
            registration.model_name = facts.model_name
            registration.capacity.num_kv_blocks = facts.num_kv_blocks
            registration.capacity.block_size = facts.block_size
            registration.capacity.max_num_seqs = facts.max_num_seqs
            registration.capacity.max_model_len = facts.max_model_len
        return registration

    def _report(self) -> coordinator_pb2.EngineReport:
        """How the engine is now, without a number."""
        identity, figures = self._engine.identity, self._engine.board.read()
        report = coordinator_pb2.EngineReport(
            state=_STATES[self._engine.lifecycle.state], step_number=figures.step_number
        )
        if figures.scheduler is not None:
            report.load.engine_id = identity.engine_id
            report.load.engine_epoch = identity.engine_epoch
            report.load.step_number = figures.step_number
            report.load.num_running = figures.scheduler.num_running
            report.load.num_waiting = figures.scheduler.num_waiting + figures.scheduler.num_blocked
            report.load.num_waiting_tokens = figures.scheduler.num_waiting_tokens
            report.load.num_used_blocks = figures.scheduler.num_used_blocks
            report.load.num_total_blocks = figures.scheduler.num_total_blocks
        return report


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"no answer within {_HANDSHAKE_S:g} s"
