"""The engine's membership at the coordinator: registration and reports up, commands down, for ever.

The engine works without it: a coordinator that is away costs one log line and is looked for again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import Failure, ServedEngine
from engine_svc.convert import messages
from engine_svc.data_parallel.driver import RankStatus
from engine_svc.membership.commands import EXIT_MISMATCH, CommandHandler
from engine_svc.membership.departure import Departure
from engine_svc.membership.reports import registration_of, report_of
from service_kit.channel import open_channel
from service_kit.clock import Clock
from service_kit.errors import FailedPrecondition, InvalidArgument, from_rpc_error
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2

_LEAST_INTERVAL_S = 0.1
# An engine without work has little to tell, and idle processes should stay idle.
_IDLE_INTERVAL_S = 0.5
_RENEW_AFTER_S = 1.0  # until the coordinator names its own


class ReportSchedule:
    """How often one session reports. Another session begins with another one: what it may do it is told."""

    def __init__(self) -> None:
        self._interval_s = _LEAST_INTERVAL_S
        self._renew_after_s = _RENEW_AFTER_S
        self._renew_at = float("-inf")

    def set_interval(self, interval_s: float) -> None:
        """Leave so much time between two reports of changes, but never so much that the lease ends."""
        self._interval_s = max(_LEAST_INTERVAL_S, interval_s)

    def set_renewal(self, renew_after_s: float) -> None:
        """Renew the lease so long after the last report at the latest."""
        self._renew_after_s = renew_after_s

    def must_renew(self, now: float) -> bool:
        """Whether a report is due even if it says nothing new."""
        return now >= self._renew_at

    def note_report(self, now: float) -> None:
        """A report is about to be sent."""
        self._renew_at = now + self._renew_after_s

    def wait_s(self, now: float, *, has_work: bool) -> float:
        """How long to wait before it is looked again whether there is something to report."""
        interval_s = self._interval_s if has_work else max(self._interval_s, _IDLE_INTERVAL_S)
        return max(0.0, min(interval_s, self._renew_at - now))


class Fence:
    """The highest epoch of a coordinator that was heard of; one that is lower has to wait for a lease."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoch = 0
        self._lease_s = 0.0
        self._observed_at = 0.0

    def observe(self, epoch: int, lease_s: float) -> bool:
        """A coordinator of that epoch speaks, and grants such a lease. Whether it is to be obeyed."""
        now = self._clock.now()
        if epoch < self.least:
            return False
        self._epoch, self._lease_s, self._observed_at = epoch, lease_s, now
        return True

    @property
    def epoch(self) -> int:
        """The epoch that was obeyed last; 0: none was heard yet."""
        return self._epoch

    @property
    def least(self) -> int:
        """The least epoch that is obeyed now; 0: any."""
        return self._epoch if self._clock.now() < self._observed_at + self._lease_s else 0


logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_GOODBYE_S = 1.0

# What a coordinator answers who cannot step with the engines that it knows.
MISMATCH = "PARALLEL_CONFIG_MISMATCH"
# Generations that were met in and lost again before anybody could be told; more than these follow no rule.
_MAX_UNREPORTED = 64

_Request: TypeAlias = coordinator_pb2.EngineSessionRequest
_Response: TypeAlias = coordinator_pb2.EngineSessionResponse
_Call: TypeAlias = "grpc.aio.StreamStreamCall[_Request, _Response]"


class Membership:
    """Keeps one engine registered, and has it do what the coordinator commands."""

    def __init__(
        self, engine: ServedEngine, *, coordinator: str, endpoint: str, departure: Departure
    ) -> None:
        self._engine = engine
        self._coordinator = coordinator
        self._endpoint = endpoint
        self._command_handler = CommandHandler(engine, departure, self)
        self._fence = Fence(engine.clock)
        self._lease_s = 0.0
        self._epoch = 0  # of the coordinator of this session
        self._answering: set[asyncio.Task[None]] = set()
        # Each generation is reported, even one that was lost again at once.
        self._unreported: deque[RankStatus] = deque(maxlen=_MAX_UNREPORTED)
        self._generation = 0
        self._report_schedule = ReportSchedule()  # of this session
        self._seq = 0
        self._writing = asyncio.Lock()  # a stream takes one write at a time
        self._state_changed = asyncio.Event()
        engine.lifecycle.subscribe(lambda state: self._state_changed.set())
        engine.on_rank_status.append(self._on_rank_status)

    @property
    def is_member(self) -> bool:
        """Whether a coordinator has taken the registration and its session stands."""
        return self._engine.is_member

    def set_interval(self, interval_s: float) -> None:
        """Report changes so often, but those of membership and waves at once."""
        self._report_schedule.set_interval(interval_s)

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
                    mismatch = _mismatch(error)
                    # One that serves already is no worse for it: the coordinator may be another one's.
                    if mismatch is not None and self._engine.lifecycle.state is EngineState.LOADING:
                        self._engine.fail(Failure(mismatch, EXIT_MISMATCH))
                        return
                    # Once, or an engine without its coordinator would fill the log.
                    if self.is_member or not has_complained:
                        logger.warning("no membership at the coordinator", extra={"cause": _cause(error)})
                        has_complained = True
                if self.is_member:
                    retry_s = _FIRST_RETRY_S
                    # Until now it has been heard.
                    self._fence.observe(self._epoch, self._lease_s)
                self._engine.note_member(False)
                # Jitter, so that a fleet does not come back as one.
                await self._pause(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _hold_session(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        """Register and report until the stream breaks or the engine has ended."""
        call = stub.EngineSession()
        self._report_schedule = ReportSchedule()
        # Who was not told of them goes by where the engine stands now.
        self._unreported.clear()
        try:
            await call.write(_Request(register=self._as_of_now(self._registration())))
            responses = aiter(call)
            async with asyncio.timeout(_HANDSHAKE_S):
                answer = await anext(responses, None)
            if answer is None:
                return
            self._take_registered(answer)
            commands = asyncio.create_task(self._read_commands(call, responses))
            try:
                await self._report_until_done(call, commands)
            finally:
                commands.cancel()
                # Its error may be what ends this session, and then this frame is in the traceback.
                del commands
                for answering in self._answering:
                    answering.cancel()
        finally:
            call.cancel()

    async def _report_until_done(self, call: _Call, commands: asyncio.Task[None]) -> None:
        reported: coordinator_pb2.EngineReport | None = None
        registered = self._registration()
        clock = self._engine.clock
        while not commands.done():
            registration = self._registration()
            if registration != registered:
                await self._write(call, _Request(register=self._as_of_now(registration)))
                registered = registration
            # An end that comes while a report is sent is told by the next one.
            has_ended = self._engine.lifecycle.has_ended
            rank_status = self._unreported.popleft() if self._unreported else self._rank_status()
            report = report_of(self._engine, rank_status)
            if report != reported or self._report_schedule.must_renew(clock.now()):
                self._seq += 1
                self._report_schedule.note_report(clock.now())
                numbered = coordinator_pb2.EngineReport(seq=self._seq)
                numbered.MergeFrom(report)
                await self._write(call, _Request(report=numbered))
                reported = report
            if has_ended:
                await self._send_goodbye(call, commands)
                return
            if self._unreported:
                continue
            has_work = self._engine.stats_snapshot.read().has_work
            await self._pause(self._report_schedule.wait_s(clock.now(), has_work=has_work), commands)
        try:
            await commands
        finally:
            # Or this frame, which is in the traceback of the task's error, would keep it and the call.
            del commands

    async def _send_goodbye(self, call: _Call, commands: asyncio.Task[None]) -> None:
        if self._engine.lifecycle.state is EngineState.STOPPED:
            goodbye = coordinator_pb2.EngineGoodbye(reason="drained")
            await self._write(call, _Request(goodbye=goodbye))
        await call.done_writing()
        # The coordinator ends the stream when it has read the last word.
        await asyncio.wait({commands}, timeout=_GOODBYE_S)

    async def _read_commands(self, call: _Call, responses: AsyncIterator[_Response]) -> None:
        async for message in responses:
            match message.WhichOneof("message"):
                case "registered":
                    self._take_registered(message)
                case "command":
                    answering = asyncio.create_task(self._answer(call, message.command))
                    self._answering.add(answering)
                    answering.add_done_callback(self._answering.discard)
                case kind:
                    logger.info("unknown message ignored", extra={"kind": str(kind)})

    async def _pause(self, seconds: float, *others: asyncio.Task[None]) -> None:
        """Wait, but no longer than until the engine's state changes or one of these tasks ends."""
        changing = asyncio.ensure_future(self._state_changed.wait())
        try:
            await asyncio.wait({changing, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()
        self._state_changed.clear()

    async def _write(self, call: _Call, message: _Request) -> None:
        async with self._writing:
            await call.write(message)

    async def _answer(self, call: _Call, command: command_pb2.Command) -> None:
        """Have a command done, and say so when it is; a stream that broke meanwhile is told by the next."""
        if self._fence.observe(self._epoch, self._lease_s):
            result = await asyncio.shield(self._command_handler.take(command, self._epoch))
        else:
            self._engine.num_fenced_commands += 1
            kind = command.WhichOneof("command") or "unknown"
            logger.warning("command of an older coordinator refused", extra={"command": kind})
            result = command_pb2.CommandResult(command_id=command.command_id)
            error = FailedPrecondition(
                "a newer coordinator was heard within its lease, and only that one is obeyed", reason="FENCED"
            )
            result.nack.CopyFrom(messages.to_error_status(error))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write(call, _Request(command_result=result))

    def _take_registered(self, message: _Response) -> None:
        registered = message.registered
        if registered.renew_after_ms:
            self._report_schedule.set_renewal(registered.renew_after_ms / 1000)
        self._epoch, self._lease_s = registered.coordinator_epoch, registered.lease_ms / 1000
        before = self._fence.epoch
        if self._fence.observe(self._epoch, self._lease_s) and before not in (0, self._epoch):
            self._command_handler.forget_prepared()
        if not self.is_member:
            self._engine.note_member(True)
            logger.info("registered at the coordinator", extra={"lease_ms": registered.lease_ms})

    def _on_rank_status(self, rank_status: RankStatus) -> None:
        if rank_status.generation != self._generation:
            self._generation = rank_status.generation
            self._unreported.append(rank_status)
        self._state_changed.set()

    def _rank_status(self) -> RankStatus | None:
        core = self._engine.core
        return None if core is None or core.lockstep is None else core.lockstep.rank_status

    def _registration(self) -> member_pb2.EngineRegistration:
        """Who the engine is; what reports tell of as well is left out."""
        return registration_of(self._engine, self._endpoint)

    def _as_of_now(self, registration: member_pb2.EngineRegistration) -> member_pb2.EngineRegistration:
        """With what changes without being worth a registration of its own."""
        rank_status = self._rank_status()
        as_of_now = member_pb2.EngineRegistration(highest_coordinator_epoch=self._fence.least)
        as_of_now.MergeFrom(registration)
        if rank_status is not None:
            as_of_now.wave = rank_status.wave
        return as_of_now


def _mismatch(error: Exception) -> str | None:
    """Why this engine can never be a member as it is, in words for people; None where it can."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return None
    refusal = from_rpc_error(error)
    if isinstance(refusal, InvalidArgument) or refusal.reason == MISMATCH:
        return refusal.message
    return None


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"no answer within {_HANDSHAKE_S:g} s"
