"""Executes the coordinator's commands, each once even if it is repeated. Knows no stream.

Runs on the event loop. Commands that change how the engine steps run on its thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from engine_svc.admin.served_engine import Failure, ServedEngine
from engine_svc.convert import messages
from engine_svc.data_parallel.driver import LockstepDriver, PreparedGeneration
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.weights_check import WEIGHTS_MISMATCH
from engine_svc.loop.answer import give
from engine_svc.loop.mailbox import Call
from engine_svc.loop.pause import RunState
from engine_svc.membership.departure import Departure
from triptych.coordinator.v1 import command_pb2
from triptych_kit.errors import FailedPrecondition, Internal, InvalidArgument, ServiceError, Unimplemented

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A coordinator repeats commands that are not answered soon, but none that is older than this many others.
_MAX_REMEMBERED = 256
_MAX_RANKS = 4096
# Ranks exchange wave and generation numbers as signed 64-bit integers and increment them.
_MAX_NUMBER = 1 << 62

# Exit code of an engine that does not match its group.
EXIT_MISMATCH = 2


class MembershipReporter(Protocol):
    def set_interval(self, interval_s: float) -> None: ...


class CommandHandler:
    def __init__(self, engine: ServedEngine, departure: Departure, reporter: MembershipReporter) -> None:
        self._engine = engine
        self._departure = departure
        self._reporter = reporter
        self._known: OrderedDict[tuple[int, int], asyncio.Task[command_pb2.CommandResult]] = OrderedDict()
        self._newest = 0  # newest generation that this engine was asked to prepare
        self._preparing: command_pb2.PrepareScale | None = None  # the order being prepared, or prepared last
        self._prepared: PreparedGeneration | None = None
        self._committed = 0
        self._change: asyncio.Future[None] | None = None  # done when that generation is formed or has failed
        # One thread: loads read from the same disk, and only the last one counts.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._handlers: dict[str, Callable[[command_pb2.Command], Awaitable[None]]] = {
            "start_wave": self._start_wave,
            "prepare_scale": self._prepare_scale,
            "commit_scale": self._commit_scale,
            "abort_scale": self._abort_scale,
            "drain": self._drain,
            "update_interval": self._update_interval,
        }

    def take(self, command: command_pb2.Command, epoch: int) -> asyncio.Task[command_pb2.CommandResult]:
        """Start a command of the coordinator with this epoch, or return the task of its first delivery."""
        key = (epoch, command.command_id)
        task = self._known.get(key)
        # An interval holds for one stream only, so it is applied again when repeated on the next one.
        if task is None or command.WhichOneof("command") == "update_interval":
            task = self._known[key] = asyncio.create_task(self._answer(command))
            # Running commands are kept: a repetition of a forgotten one would run it again.
            done = (old for old, known in self._known.items() if known.done())
            for old in list(itertools.islice(done, max(0, len(self._known) - _MAX_REMEMBERED))):
                del self._known[old]
        return task

    def forget_prepared(self) -> None:
        """Roll back what the previous coordinator has prepared but not committed."""
        if self._preparing is not None and self._newest > self._committed:
            self._give_up()

    async def _answer(self, command: command_pb2.Command) -> command_pb2.CommandResult:
        result = command_pb2.CommandResult(command_id=command.command_id)
        name = command.WhichOneof("command") or "unknown"
        work = asyncio.ensure_future(self._do(name, command))
        await asyncio.wait((work,))
        error = work.exception()
        if error is None:
            result.ack.SetInParent()
            return result
        if not isinstance(error, ServiceError):
            logger.error("command failed", exc_info=error, extra={"command": name})
            error = Internal("internal error, see the engine's log")
        logger.info("command refused", extra={"command": name, "cause": error.message})
        result.nack.CopyFrom(messages.to_error_status(error))
        return result

    async def _do(self, name: str, command: command_pb2.Command) -> None:
        handler = self._handlers.get(name)
        if handler is None:
            raise Unimplemented(f"command {name} is not implemented by this engine")
        await handler(command)

    async def _start_wave(self, command: command_pb2.Command) -> None:
        driver, start = self._driver("start_wave"), command.start_wave
        if self._engine.identity.engine_id in start.exclude:
            return
        _check_number("start_wave.wave", start.wave)
        if not await self._ask(lambda: driver.start(start.wave)):
            rank_status = driver.rank_status
            raise FailedPrecondition(
                f"wave {start.wave} cannot begin: this rank is {rank_status.state.value} "
                f"at {rank_status.wave}",
                reason="WAVE_REFUSED",
            )

    async def _prepare_scale(self, command: command_pb2.Command) -> None:
        driver, order = self._driver("prepare_scale"), command.prepare_scale
        _check_number("prepare_scale.generation", order.generation)
        if order == self._preparing and self._prepared is not None:
            return
        if order.generation <= self._newest and order != self._preparing:
            raise FailedPrecondition(
                f"generation {order.generation} is too old: this engine has prepared {self._newest}",
                reason="OLD_GENERATION",
            )
        meeting = None
        if not order.leave:
            meeting = _meeting(order, driver)
        if meeting is not None and self._engine.run_state is RunState.ASLEEP:
            raise FailedPrecondition("this engine is asleep: wake it first", reason="ENGINE_ASLEEP")
        self._newest, self._preparing, self._prepared = order.generation, order, None
        may_release = await self._ask(lambda: driver.supersede(order.generation))
        if meeting is None:
            await self._departure.run_dry()
        else:
            self._departure.stay()
            await self._load(lambda: driver.prepare(meeting, may_release=may_release))
        if self._preparing != order:
            raise FailedPrecondition(f"generation {order.generation} was aborted", reason="GIVEN_UP")
        self._prepared = PreparedGeneration(order.generation, meeting)
        logger.info(
            "generation prepared",
            extra={"generation": order.generation, "leaves": meeting is None, "size": order.new_size},
        )

    async def _commit_scale(self, command: command_pb2.Command) -> None:
        driver, generation = self._driver("commit_scale"), command.commit_scale.generation
        if self._change is not None and generation == self._committed:
            await asyncio.shield(self._change)
            return
        if self._engine.run_state is RunState.ASLEEP:
            raise FailedPrecondition("this engine is asleep: wake it first", reason="ENGINE_ASLEEP")
        prepared = self._prepared
        if prepared is None or prepared.generation != generation:
            raise FailedPrecondition(
                f"generation {generation} is not prepared here: the newest is {self._newest}, the last "
                f"committed one is {self._committed}",
                reason="NOT_PREPARED" if generation > self._newest else "OLD_GENERATION",
            )
        self._committed = generation
        answer: Future[None] = Future()
        lost_generation = command.commit_scale.lost_generation
        self._engine.inbox.put(Call(lambda: driver.commit(prepared, answer, lost_generation)))
        driver.break_off(lost_generation)
        self._change = asyncio.wrap_future(answer)
        try:
            await asyncio.shield(self._change)
        except FailedPrecondition as error:
            # Engines that waited for this one would stop with it: it fails, so that the others continue.
            if error.reason == WEIGHTS_MISMATCH:
                self._engine.fail(Failure(error.message, EXIT_MISMATCH))
            raise
        if prepared.meeting is None:
            self._departure.leave()

    async def _abort_scale(self, command: command_pb2.Command) -> None:
        self._driver("abort_scale")
        generation = command.abort_scale.generation
        if generation <= self._committed:
            raise FailedPrecondition(
                f"generation {generation} is already committed and cannot be aborted", reason="COMMITTED"
            )
        if generation == self._newest:
            self._give_up()

    def _give_up(self) -> None:
        driver = self._driver("abort_scale")
        self._preparing = self._prepared = None
        self._departure.stay()
        self._loader.submit(driver.forget)

    async def _drain(self, command: command_pb2.Command) -> None:
        deadline_ms = command.drain.deadline_ms
        logger.info("drain requested by the coordinator", extra={"deadline_ms": deadline_ms})
        self._departure.drain(deadline_ms / 1000 if deadline_ms else None)

    async def _update_interval(self, command: command_pb2.Command) -> None:
        self._reporter.set_interval(command.update_interval.interval_ms / 1000)

    def _driver(self, name: str) -> LockstepDriver:
        core = self._engine.core
        if core is None or core.lockstep is None:
            raise Unimplemented(
                f"command {name} is for engines that step together, this one steps alone"
                if core is not None
                else f"command {name} cannot run before the model is loaded"
            )
        return core.lockstep

    async def _ask(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread and return its result."""
        answer: Future[T] = Future()
        self._engine.inbox.put(Call(lambda: give(answer, work)))
        return await asyncio.wrap_future(answer)

    async def _load(self, work: Callable[[], None]) -> None:
        """Run `work` on the expert loading thread; errors an operator can fix become FailedPrecondition."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._loader, work)
        except (ValueError, OSError) as error:
            raise FailedPrecondition(f"experts cannot be loaded: {error}", reason="NOT_LOADED") from error


def _check_number(field: str, number: int) -> None:
    if number > _MAX_NUMBER:
        raise InvalidArgument(f"{field} is {number}, the limit is {_MAX_NUMBER}", field=field)


def _meeting(order: command_pb2.PrepareScale, driver: LockstepDriver) -> Meeting:
    """The rendezvous and rank at which this engine meets the others. Raises InvalidArgument."""
    if not order.HasField("rendezvous"):
        raise InvalidArgument("prepare_scale has no rendezvous", field="prepare_scale.rendezvous")
    if order.WhichOneof("place") != "rank":
        raise InvalidArgument("prepare_scale has neither rank nor leave", field="prepare_scale.rank")
    own_hash = driver.parallel_config_hash
    if order.rendezvous.parallel_config_hash not in ("", own_hash):
        raise FailedPrecondition(
            f"parallel_config_hash of this engine is {own_hash!r}, that of the group is "
            f"{order.rendezvous.parallel_config_hash!r}",
            reason="PARALLEL_CONFIG_MISMATCH",
        )
    rank, size = order.rank, order.new_size
    if not 1 <= size <= _MAX_RANKS or rank >= size:
        raise InvalidArgument(
            f"rank {rank} of {size} is invalid, the limit is {_MAX_RANKS} ranks",
            field="prepare_scale.new_size",
        )
    return Meeting(order.generation, rank, size, order.rendezvous.master_address, order.rendezvous.store_port)
