"""The engine's membership at the coordinator: sends registration and reports, receives commands.

The engine works without it: an unreachable coordinator costs one log message, and the engine keeps retrying.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.backoff import Backoff
from triptych_kit.channel import NO_CREDENTIALS, ChannelCredentials, open_channel
from triptych_kit.clock import Clock
from triptych_kit.config import ConfigError
from triptych_kit.errors import FailedPrecondition, InvalidArgument, from_rpc_error

logger = logging.getLogger(__name__)

_LEAST_INTERVAL_S = 0.1
# An engine without work has little to report, and idle processes should stay idle.
_IDLE_INTERVAL_S = 0.5
_RENEW_AFTER_S = 1.0  # until the coordinator sends its own value
_HANDSHAKE_S = 10.0
_GOODBYE_S = 1.0

# Reason in a coordinator's refusal of an engine that cannot step with those it knows.
MISMATCH = "PARALLEL_CONFIG_MISMATCH"
# Generations that were formed and lost again before they could be reported.
_MAX_UNREPORTED = 64

_Request: TypeAlias = coordinator_pb2.EngineSessionRequest
_Response: TypeAlias = coordinator_pb2.EngineSessionResponse
_Call: TypeAlias = "grpc.aio.StreamStreamCall[_Request, _Response]"


class Membership:
    """Keeps one engine registered at the coordinator, and executes the coordinator's commands."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        coordinator: str,
        endpoint: str,
        departure: Departure,
        credentials: ChannelCredentials = NO_CREDENTIALS,
    ) -> None:
        self._engine = engine
        self._coordinator = coordinator
        self._credentials = credentials
        self._endpoint = endpoint
        self._command_handler = CommandHandler(engine, departure, self)
        self._fence = Fence(engine.clock)
        self._lease_s = 0.0
        self._epoch = 0  # epoch of the coordinator of this stream
        self._answering: set[asyncio.Task[None]] = set()
        # Each generation is reported, also one that was lost again at once.
        self._unreported: deque[RankStatus] = deque(maxlen=_MAX_UNREPORTED)
        self._generation = 0
        self._report_schedule = ReportSchedule()  # of this stream
        self._seq = 0
        self._writing = asyncio.Lock()  # gRPC allows one write at a time on a stream
        self._state_changed = asyncio.Event()
        engine.lifecycle.subscribe(lambda state: self._state_changed.set())
        engine.on_rank_status.append(self._on_rank_status)

    @property
    def is_member(self) -> bool:
        """Whether the engine is registered and the stream to the coordinator is open."""
        return self._engine.is_member

    def set_interval(self, interval_s: float) -> None:
        """Set the interval between load reports; changes of membership and waves are reported at once."""
        self._report_schedule.set_interval(interval_s)

    async def run(self) -> None:
        """Stay registered until cancelled, or until the engine has ended."""
        backoff = Backoff(self._engine.clock)
        has_complained = False
        while not self._engine.lifecycle.has_ended:
            try:
                # A new channel each time: certificates may have been replaced.
                async with open_channel(self._coordinator, credentials=self._credentials) as channel:
                    await self._hold_session(coordinator_pb2_grpc.CoordinatorServiceStub(channel))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ConfigError) as error:
                mismatch = _mismatch(error)
                # An engine that already serves keeps serving: this may be the wrong coordinator.
                if mismatch is not None and self._engine.lifecycle.state is EngineState.LOADING:
                    self._engine.fail(Failure(mismatch, EXIT_MISMATCH))
                    return
                # Logged once: an engine without its coordinator would fill the log.
                if self.is_member or not has_complained:
                    logger.warning("coordinator unavailable", extra={"cause": _cause(error)})
                    has_complained = True
            if self.is_member:
                backoff.note_connected()
                # The coordinator was connected until now: its lease starts here.
                self._fence.observe(self._epoch, self._lease_s)
            self._engine.note_member(False)
            await self._pause(backoff.next_s())

    async def _hold_session(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        """Register and report until the stream breaks or the engine has ended."""
        call = stub.EngineSession()
        self._report_schedule = ReportSchedule()
        # A new stream starts from the engine's present status.
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
                # The task's error may end this session, and its traceback would then keep this frame alive.
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
            # If the engine ends while a report is being sent, the next one reports that.
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
            # The traceback of the task's error refers to this frame, which would keep the task and the call.
            del commands

    async def _send_goodbye(self, call: _Call, commands: asyncio.Task[None]) -> None:
        if self._engine.lifecycle.state is EngineState.STOPPED:
            goodbye = coordinator_pb2.EngineGoodbye(reason="drained")
            await self._write(call, _Request(goodbye=goodbye))
        await call.done_writing()
        # The coordinator ends the stream when it has read the goodbye.
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
        """Wait until the time is over, the engine's state changes, or one of `others` ends."""
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
        """Run a command and send its result. If the stream breaks meanwhile, the coordinator repeats it."""
        if self._fence.observe(self._epoch, self._lease_s):
            result = await asyncio.shield(self._command_handler.take(command, self._epoch))
        else:
            self._engine.num_fenced_commands += 1
            kind = command.WhichOneof("command") or "unknown"
            logger.warning("command of an older coordinator refused", extra={"command": kind})
            result = command_pb2.CommandResult(command_id=command.command_id)
            error = FailedPrecondition(
                "fenced: a newer coordinator holds the lease, only its commands are accepted", reason="FENCED"
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
        """Identity and facts of the engine, without what reports contain."""
        return registration_of(self._engine, self._endpoint)

    def _as_of_now(self, registration: member_pb2.EngineRegistration) -> member_pb2.EngineRegistration:
        """Add to `registration` the values whose change alone does not require a new registration."""
        rank_status = self._rank_status()
        as_of_now = member_pb2.EngineRegistration(highest_coordinator_epoch=self._fence.least)
        as_of_now.MergeFrom(registration)
        if rank_status is not None:
            as_of_now.wave = rank_status.wave
        return as_of_now


class ReportSchedule:
    """When to send the next report on one stream. Each stream starts with the defaults."""

    def __init__(self) -> None:
        self._interval_s = _LEAST_INTERVAL_S
        self._renew_after_s = _RENEW_AFTER_S
        self._renew_at = float("-inf")

    def set_interval(self, interval_s: float) -> None:
        """Set the interval between reports of changes; the lease is renewed in time in any case."""
        self._interval_s = max(_LEAST_INTERVAL_S, interval_s)

    def set_renewal(self, renew_after_s: float) -> None:
        """Renew the lease at the latest this long after the last report."""
        self._renew_after_s = renew_after_s

    def must_renew(self, now: float) -> bool:
        """Whether a report is due even without a change."""
        return now >= self._renew_at

    def note_report(self, now: float) -> None:
        self._renew_at = now + self._renew_after_s

    def wait_s(self, now: float, *, has_work: bool) -> float:
        """How long to wait before checking for changes again."""
        interval_s = self._interval_s if has_work else max(self._interval_s, _IDLE_INTERVAL_S)
        return max(0.0, min(interval_s, self._renew_at - now))


class Fence:
    """The highest coordinator epoch observed. Commands of a lower one are refused until its lease expires."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoch = 0
        self._lease_s = 0.0
        self._observed_at = 0.0

    def observe(self, epoch: int, lease_s: float) -> bool:
        """Record a message from the coordinator with `epoch`; returns whether its commands are accepted."""
        now = self._clock.now()
        if epoch < self.least:
            return False
        self._epoch, self._lease_s, self._observed_at = epoch, lease_s, now
        return True

    @property
    def epoch(self) -> int:
        """The epoch accepted last; 0: none yet."""
        return self._epoch

    @property
    def least(self) -> int:
        """The lowest epoch that is accepted now; 0: any."""
        return self._epoch if self._clock.now() < self._observed_at + self._lease_s else 0


def _mismatch(error: Exception) -> str | None:
    """Error message if this engine can never be a member with its configuration, else None."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return None
    refusal = from_rpc_error(error)
    if isinstance(refusal, InvalidArgument) or refusal.reason == MISMATCH:
        return refusal.message
    return None


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, ConfigError):
        return str(error)
    return f"no answer within {_HANDSHAKE_S:g} s"
