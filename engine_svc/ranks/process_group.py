"""Runs plans in several processes that hold one model together. Knows no model and no device.

Every rank receives the same bytes and acts on them in the same way. The ranks of the last stage have the
sampled tokens. One of them reports: whole results to the engine, only the tokens to earlier stages.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine_svc.core.extras import NO_EXTRAS, Extra, ExtraCodec, Extras
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.model.process_parallel import RankPosition
from engine_svc.ranks.control_pipe import RankMessage
from engine_svc.ranks.plan_channel import (
    Channel,
    ChannelInterrupted,
    ChannelReader,
    ChannelTimeout,
    ChannelWriter,
    create_channel,
)
from engine_svc.ranks.plan_codec import CALL, DROP, PLAN, PREPARE, STOP, PlanEncoder, encode_preparation
from engine_svc.ranks.progress_board import RankHeartbeats
from engine_svc.ranks.result_codec import decode_result
from engine_svc.ranks.watch import RankLost, RankStart, RankWatch, WatchLimits
from engine_svc.runner.preparer import OnPrepared

_HEART_INTERVAL_S = 0.1
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Timeouts of the engine for its ranks; `watch` limits the time without a heartbeat."""

    watch: WatchLimits = field(default_factory=WatchLimits)
    start_s: float = 1800.0  # enough to load a large model over a slow network
    step_s: float = 300.0  # for the result of a step, from when the engine waits for it
    room_s: float = 60.0  # for the slowest rank to read a plan


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The program of ranks: a module, its settings besides the rank's position, and its environment."""

    module: str
    settings: Mapping[str, object]
    environment: Mapping[str, str]


class RanksStarting:
    """Ranks that are loading: `loaded` waits for their reports, `finish` lets them go on."""

    def __init__(
        self,
        positions: Sequence[RankPosition],
        launch: RankLaunch,
        *,
        limits: GroupLimits,
        on_lost: Callable[[RankLost], object] = lambda lost: None,
        on_prepared: OnPrepared = lambda number, failure: None,
        on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    ) -> None:
        self._limits = limits
        self._on_progress = on_progress
        self._positions = tuple(positions)
        early = [position for position in positions if not position.is_last_stage]
        self._plans = create_channel(len(positions))
        self._results = create_channel(1)
        # A separate channel: the engine's results may be larger than a ring, and stages read when they have a
        # plan.
        self._tokens = create_channel(len(early))
        self._heartbeats = RankHeartbeats.create(len(positions))
        self._store_fd = os.memfd_create("triptych-store", os.MFD_CLOEXEC)
        starts = [self._start_of(position, early, launch) for position in positions]
        self._watch = RankWatch(
            starts, self._heartbeats, limits=limits.watch, on_lost=on_lost, on_prepared=on_prepared
        )

    def loaded(self) -> list[RankMessage]:
        """The report of each rank about its part of the model, in order.

        Raises ValueError for what an operator can fix, RankLost for other failures, or TimeoutError;
        afterwards no rank is left.
        """
        return self._one_of_each("loaded")

    def finish(
        self,
        settings: Sequence[Mapping[str, object]],
        *,
        max_num_seqs: int,
        num_groups: int,
        extras: Sequence[type[Extra]] = (),
    ) -> ProcessGroup:
        """Let each rank make its cache and rows by its `settings`, and wait for it. Raises like `loaded`."""
        sizes = {"max_num_seqs": max_num_seqs, "num_groups": num_groups}
        for rank, of_rank in enumerate(settings):
            self._watch.send(rank, {"sizes": {**of_rank, **sizes}})
        self._one_of_each("ready")
        self._watch.all_are_ready()
        os.close(self._store_fd)
        self._tokens.close()
        codec = ExtraCodec(extras)
        encoder = PlanEncoder(max_num_seqs=max_num_seqs, num_groups=num_groups, extras=codec)
        return ProcessGroup(
            self._watch,
            self._heartbeats,
            self._plans,
            self._results,
            encoder,
            self._limits,
            codec,
            num_preparing=len(self._positions),
        )

    def give_up(self) -> None:
        """End the ranks by force: they may be loading, and would not end by themselves."""
        self._watch.stop(grace_s=0.0)
        os.close(self._store_fd)
        self._tokens.close()
        _close(self._plans, self._results, self._heartbeats)

    def _one_of_each(self, kind: str) -> list[RankMessage]:
        deadline = time.monotonic() + self._limits.start_s
        received: dict[int, RankMessage] = {}
        try:
            while len(received) < len(self._positions):
                rank, message = self._watch.next_message(max(0.0, deadline - time.monotonic()))
                if "progress" in message:
                    self._on_progress(*_list_in(message, "progress"))
                elif "refused" in message:
                    raise ValueError(message["refused"])
                else:
                    received[rank] = _object_in(message, kind)
        except (RankLost, TimeoutError, ValueError):
            self.give_up()
            raise
        return [received[rank] for rank in range(len(self._positions))]

    def _start_of(
        self, position: RankPosition, early: Sequence[RankPosition], launch: RankLaunch
    ) -> RankStart:
        plans = self._plans.readers[position.rank]
        spec: dict[str, object] = {
            **launch.settings,
            "rank": position.rank,
            "tp_size": position.tp_size,
            "pp_size": position.pp_size,
            "divides_experts": position.divides_experts,
            "store_fd": self._store_fd,
            "board_fd": self._heartbeats.fd,
            "heart_interval_s": _HEART_INTERVAL_S,
            "plans": [*plans.fds, plans.capacity],
        }
        fds = [self._store_fd, self._heartbeats.fd, *plans.fds]
        if position.reports:
            for name, channel in (("results_out", self._results), ("tokens_out", self._tokens)):
                spec[name] = [channel.writer.memory_fd, channel.writer.capacity, *channel.writer.fds[1:]]
                fds += channel.writer.fds
        elif not position.is_last_stage:
            tokens = self._tokens.readers[early.index(position)]
            spec["tokens_in"] = [*tokens.fds, tokens.capacity]
            fds += tokens.fds
        return RankStart(launch.module, spec, tuple(fds), launch.environment)


class ProcessGroup:
    """The executor of an engine whose model is divided over ranks."""

    def __init__(
        self,
        watch: RankWatch,
        heartbeats: RankHeartbeats,
        plans: Channel,
        results: Channel,
        encoder: PlanEncoder,
        limits: GroupLimits,
        extras: ExtraCodec = NO_EXTRAS,
        num_preparing: int = 1,
    ) -> None:
        """num_preparing: ranks that prepare."""
        self.num_preparing = num_preparing
        self._watch = watch
        self._extras = extras
        self._heartbeats = heartbeats
        self._channels = (plans, results)
        self._encoder = encoder
        self._limits = limits
        self._results = ChannelReader(results.readers[0], interrupt_fd=watch.lost_fd)
        # While a rank waits for room for a result it reads no plan.
        self._plans = ChannelWriter(plans.writer, interrupt_fd=watch.lost_fd, replies=self._results)
        self._is_open = True
        # Rows of steps whose results were not taken, for which a feature raised in a rank that reports none.
        self._failed_rows: dict[int, dict[int, str]] = {}
        self._num_failures = 0  # reports of such rows that were read
        self.num_plan_bytes = 0

    @property
    def process_ids(self) -> list[int]:
        return self._watch.process_ids

    def launch(self, plan: StepPlan) -> LaunchedPlan:
        """Send the plan to every rank. Raises RankLost if a rank is lost."""
        message = self._encoder.encode(plan)
        self._send(PLAN + message)
        self.num_plan_bytes += len(message)
        return LaunchedPlan(self)

    def call(self, name: str, arguments: Mapping[str, object] | None = None) -> list[RankMessage]:
        """Have every rank run the call of this name after the plans launched before; returns their answers.

        Takes no results: those of steps in flight are still to be taken.
        """
        self._watch.may_be_busy = True
        try:
            return self._answers_to(name, arguments or {})
        finally:
            self._watch.may_be_busy = False

    def prepare(self, number: int, request_id: str, extras: Extras, account: str, weight: int) -> None:
        """Have every rank that samples prepare these; `on_prepared` is called with each answer."""
        body = encode_preparation(number, request_id, extras, account, weight, self._extras)
        self._send(PREPARE + body)

    def drop_prepared(self, request_id: str) -> None:
        """Have every rank forget what it prepared, or prepares, for a request that has ended."""
        self._send(DROP + request_id.encode())

    def stop_preparing(self) -> None:
        """Ranks stop when they end."""

    def drop(self) -> None:
        """Not possible: ranks run plans on their own, and an error ends them."""
        raise self._give_up("cannot drop a step")

    def shutdown(self) -> None:
        """End the ranks and free everything; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._watch.lost is None:
            # If this fails, the ranks end when their connections are closed, which is next.
            with contextlib.suppress(ChannelInterrupted, ChannelTimeout):
                self._plans.send(STOP, timeout_s=0.0)
        self._watch.stop()
        self._plans.close()
        self._results.close()
        _close(*self._channels, self._heartbeats)

    def take_result(self) -> StepResult:
        """The oldest result not taken yet. Raises RankLost."""
        left_s = self._limits.step_s
        while left_s > 0:
            # In short waits: if this process was stopped meanwhile, only one of them counts.
            look_s = min(_LOOK_S, left_s)
            try:
                message = self._results.receive(timeout_s=look_s)
            except ChannelInterrupted:
                raise self._lost() from None
            if message is not None:
                result = decode_result(message, self._extras)
                self._add_failed_rows(result)
                return result
            left_s -= look_s
        raise self._give_up(f"did not finish a step in {self._limits.step_s:g} s")

    def _add_failed_rows(self, result: StepResult) -> None:
        """Add what other ranks reported: each before its part of the forward, and so before the result."""
        while self._num_failures < self._heartbeats.num_failures:
            try:
                _, message = self._watch.next_message(self._limits.step_s)
            except TimeoutError:
                raise self._give_up(f"did not send failed rows in {self._limits.step_s:g} s") from None
            self._keep_failed_rows(message)
        failed = self._failed_rows.pop(result.step_number, None)
        if failed is not None:
            result.failed = failed | result.failed
            result.clear_faulty()

    def _keep_failed_rows(self, message: RankMessage) -> None:
        step_number, rows = cast("tuple[int, list[tuple[int, str]]]", message["failed_rows"])
        self._num_failures += 1
        self._failed_rows.setdefault(step_number, {}).update(rows)

    def _answers_to(self, name: str, arguments: Mapping[str, object]) -> list[RankMessage]:
        self._send(CALL + json.dumps({"name": name, "arguments": arguments}).encode())
        answers: dict[int, RankMessage] = {}
        # The same timeout as for loading: weights may be read again.
        deadline = time.monotonic() + self._limits.start_s
        while len(answers) < len(self.process_ids):
            try:
                rank, message = self._watch.next_message(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise self._give_up(f"did not answer {name} in {self._limits.start_s:g} s") from None
            if "failed_rows" in message:
                self._keep_failed_rows(message)
            else:
                answers[rank] = _object_in(message, "answer")
        return [answers[rank] for rank in sorted(answers)]

    def _send(self, message: bytes) -> None:
        if self._watch.lost is not None:
            raise self._lost()
        try:
            self._plans.send(message, timeout_s=self._limits.room_s)
        except ChannelInterrupted:
            raise self._lost() from None
        except ChannelTimeout:
            raise self._give_up(f"read no plan for {self._limits.room_s:g} s") from None

    def _give_up(self, why: str) -> RankLost:
        # The slowest rank holds up the others.
        ranks = range(len(self.process_ids))
        return self._watch.blame(min(ranks, key=self._heartbeats.steps), why)

    def _lost(self) -> RankLost:
        lost = self._watch.lost
        assert lost is not None, "the channel was interrupted without a rank having been lost"
        # A new exception each time: one that is raised twice has the tracebacks of both.
        return RankLost(lost.rank, lost.why, lost.details)


@dataclass(frozen=True, slots=True)
class LaunchedPlan:
    """A step that the ranks compute."""

    group: ProcessGroup

    def result(self) -> StepResult:
        """The oldest step's result not taken yet. Raises RankLost."""
        return self.group.take_result()


def _object_in(message: RankMessage, key: str) -> RankMessage:
    value = message[key]
    assert isinstance(value, dict), f"a rank sent {value!r}, expected an object"
    return value


def _list_in(message: RankMessage, key: str) -> tuple[str, int, int]:
    value = message[key]
    assert isinstance(value, list) and len(value) == 3, f"a rank sent {value!r}, expected three values"
    return value[0], value[1], value[2]


def _close(plans: Channel, results: Channel, heartbeats: RankHeartbeats) -> None:
    plans.close()
    results.close()
    heartbeats.close()
