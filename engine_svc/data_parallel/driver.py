"""Joins the machine of waves, the process group and the expert shards to the lockstep that the loop asks.

What it does belongs to the engine thread; what it tells of itself may be read by any. Knows no wire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from engine_svc.core.errors import PeersLost
from engine_svc.data_parallel.group import ExpertShards, Meeting, RankGroup, RankGroups
from engine_svc.data_parallel.wave import LockstepState, WaveMachine
from engine_svc.data_parallel.weights_check import RankWeights, check_weights, number_of
from service_kit.errors import Aborted, FailedPrecondition

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank stands, as one picture: of several that were read one by one none needs to be true."""

    state: LockstepState = LockstepState.APART
    wave: int = 1  # the one that runs here, or the next
    asks: bool = False  # it has begun the wave and waits for the others
    generation: int = 0  # of the process group; 0: none
    # Other ranks cannot step without this one, and may want to: not where all have agreed to stand still.
    is_awaited: bool = False

    @property
    def is_in_wave(self) -> bool:
        """Whether this rank steps with the others."""
        return self.state is LockstepState.RUNNING


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation that this engine can change over to. meeting: None where it has no place in it."""

    generation: int
    meeting: Meeting | None


@dataclass(frozen=True, slots=True)
class _Order:
    """A generation that this engine was told to change over to, and who waits for that."""

    prepared: Prepared
    answer: Future[None]
    lost_generation: int  # a member of it has ended, so that nobody can vote there; 0: of none


class LockstepDriver:
    """The lockstep of one engine.

    post: has something done in the engine thread, between two steps; may be called by any thread.
    parallel_config_hash: what engines have to have in common to step together.
    weights_digest: of the weights that are in place, in hex; ranks with others are not stepped with.
    """

    def __init__(
        self,
        *,
        machine: WaveMachine,
        groups: RankGroups,
        shards: ExpertShards,
        post: Callable[[Callable[[], None]], None],
        parallel_config_hash: str = "",
        weights_digest: str = "",
    ) -> None:
        self._machine = machine
        self._groups = groups
        self._shards = shards
        self._post = post
        self._group: RankGroup | None = None
        self._next: _Order | None = None  # not tried yet
        self._num_in_flight = 0
        self._is_forming = False
        self._is_resuming = False  # told the others so, and waits for them
        self._is_closed = False
        self._is_losing = False  # leaves its group as soon as nothing is in flight
        self._has_stepped = False  # or could have: it was in a group
        self._weights = number_of(weights_digest)
        self._complaint = ""  # about the weights of ranks, that was logged last
        self._rank_status = RankStatus(wave=machine.wave)
        self._listeners: list[Callable[[RankStatus], None]] = []
        # Ranks may be waited for there: the loop goes on with what needs no step.
        self._former = ThreadPoolExecutor(1, thread_name_prefix="rank-group")
        self.parallel_config_hash = parallel_config_hash
        self.num_votes = 0
        self.num_idle_steps = 0

    # What any thread may ask.

    @property
    def rank_status(self) -> RankStatus:
        """Where this rank stands."""
        return self._rank_status

    @property
    def host(self) -> str:
        """Where other ranks reach the store of this engine."""
        return self._groups.host

    @property
    def store_port(self) -> int:
        """The port of that store."""
        return self._groups.store_port

    @property
    def meeting(self) -> Meeting | None:
        """Where the ranks of the present generation have met; None: there is none."""
        group = self._group
        return None if group is None else group.meeting

    def subscribe(self, listener: Callable[[RankStatus], None]) -> None:
        """Call `listener` with each new standing, in the engine thread. Before the loop runs."""
        self._listeners.append(listener)

    def prepare(self, meeting: Meeting, *, may_release: bool = False) -> None:
        """Load the experts that this engine will need there. For the one thread that prepares.

        may_release: `supersede` has said that nothing can run with those it holds. Raises ValueError or
        OSError.
        """
        self._shards.prepare(meeting.rank, meeting.size, may_release=may_release)

    def forget(self) -> None:
        """Give up what was prepared for a generation that will not be. For the one thread that prepares."""
        self._shards.forget()

    def break_off(self, lost_generation: int) -> None:
        """End every wait for the ranks of a group that cannot come together any more; for any thread.

        Ranks that have agreed to stand still wait for nobody, and find out when they resume.
        """
        group = self._group
        is_lost = group is not None and group.meeting.generation <= lost_generation
        if is_lost and group is not None and self._rank_status.state is not LockstepState.QUIET:
            group.close()

    # What the loop asks.

    @property
    def needs_idle_step(self) -> bool:
        """Whether this rank has to take part in a step even without requests of its own."""
        return self._machine.needs_idle_step

    def wants_step(self, has_work: bool) -> bool:
        """Whether a step would be launched now, for requests of this rank or of another; changes nothing."""
        return self._machine.wants_step(has_work)

    def may_step(self, has_work: bool) -> bool:
        """Whether a step may be launched now; begins a wave where there is a reason for one."""
        may_step = self._machine.may_step(has_work)
        self._note()
        return may_step

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        """A step was launched; every so many of them, count votes with the others. Raises PeersLost."""
        self._num_in_flight += 1
        self.num_idle_steps += is_idle
        vote = self._machine.on_step_launched(has_work)
        if vote is None:
            return
        if self._group is None:
            raise PeersLost("there is no process group to vote in")
        self.num_votes += 1
        self._machine.take(self._group.count(vote))
        self._note()

    def on_step_done(self) -> None:
        """The oldest step in flight has ended."""
        self._num_in_flight -= 1
        self._machine.on_step_done()
        self._note()
        self._leave_lost_group()
        self._change_over()

    def leave_group(self, error: Exception) -> None:
        """A step has failed here, or another rank is gone: leave the group, which ends every wait in it."""
        if self._machine.state is not LockstepState.APART:
            logger.warning("left the lockstep group", extra={"cause": f"{type(error).__name__}: {error}"})
        self._close_group()
        self._machine.leave_group()
        self._num_in_flight = 0
        self._note()
        # What is in flight is only taken back now.
        self._post(self._change_over)

    # What comes from outside, in the engine thread.

    @property
    def is_quiet(self) -> bool:
        """Whether no rank can step before this one resumes."""
        return self._machine.state is LockstepState.QUIET and not self._is_resuming

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Raise FailedPrecondition, with the reason, while the ranks may step with what this one holds.

        or_apart: what is to be done is over before a rank that is in no group can be in one.
        """
        is_apart = self._machine.state is LockstepState.APART
        if self.is_quiet or (or_apart and is_apart and not self._is_forming):
            return
        if is_apart:
            raise FailedPrecondition(
                "this engine is in no group at present, and may be in one at any time: wait until its ranks "
                "have met and stand still together",
                reason="RANKS_APART",
            )
        raise FailedPrecondition(
            "this engine steps together with the other ranks of its group: pause all of them first",
            reason="RANKS_NOT_QUIET",
        )

    def note_weights(self, digest: str) -> None:
        """Other weights have taken the place of those before, while this rank stood still or was apart."""
        self._weights = number_of(digest)

    def pause(self) -> None:
        """This rank's requests stand still; the others hear of it, and agree when theirs do as well."""
        self._machine.pause()
        self._note()

    def resume(self) -> None:
        """This rank's requests go on, where all had agreed to stand still once all others have resumed."""
        group = self._group
        if not self._machine.resume() or self._is_resuming or group is None:
            return
        self._is_resuming = True
        group.when_all_resumed(
            self._weights,
            lambda: self._post(lambda: self._all_resumed(group)),
            lambda: self._post(lambda: self._lost(group)),
        )

    def start(self, wave: int) -> bool:
        """Join a wave that another rank has begun. False where it is over, or none can run."""
        is_taken = self._machine.start(wave)
        self._note()
        return is_taken

    def on_wake_signal(self, wave: int) -> None:
        """Another rank has rung for its wave; where that cannot be joined, nobody waits for an answer."""
        self.start(wave)

    def supersede(self, generation: int) -> bool:
        """A newer generation is about to be prepared: an older one is not changed over to any more.

        Whether nothing can run here before that one is prepared and formed.
        """
        if self._next is not None and self._next.prepared.generation < generation:
            self._refuse_next(generation)
        is_apart = self._machine.state is LockstepState.APART
        return is_apart and self._next is None and not self._is_forming

    def commit(self, prepared: Prepared, answer: Future[None], lost_generation: int = 0) -> None:
        """Change over to it as soon as all ranks of the present generation can.

        A rank that stands idle in a generation up to `lost_generation` does so at once: a member has ended.
        Answered when that is done; with Aborted where another one takes its place, or the ranks do not meet.
        """
        if not answer.set_running_or_notify_cancel():
            return
        if self._next is not None:
            self._refuse_next(prepared.generation)
        self._next = _Order(prepared, answer, lost_generation)
        self._machine.get_ready(prepared.generation)
        self._note()
        self._change_over()

    def close(self) -> None:
        """Leave for good. For who ends the loop."""
        self._is_closed = True
        self._close_group()
        self._former.shutdown(wait=False)

    def _refuse_next(self, generation: int) -> None:
        order, self._next = self._next, None
        if order is not None:
            order.answer.set_exception(
                Aborted(f"generation {generation} takes its place", reason="SUPERSEDED")
            )

    def _change_over(self) -> None:
        """Begin to form the next generation, where its time has come."""
        order = self._next
        if order is None or self._num_in_flight or self._is_forming or self._is_closed:
            return
        machine = self._machine
        if machine.state is LockstepState.PAUSED and machine.generation <= order.lost_generation:
            self.leave_group(PeersLost(f"a member of generation {machine.generation} has ended"))
            return
        if order.prepared.generation != machine.switch_to:
            return
        # Tried once: where somebody is missing, another generation follows.
        self._next = None
        self._close_group()
        self._note()
        meeting = order.prepared.meeting
        if meeting is None:
            order.answer.set_result(None)
            return
        self._shards.adopt()
        self._is_forming = True
        forming = self._former.submit(self._form, meeting)
        forming.add_done_callback(lambda formed: self._post(lambda: self._take_formed(formed, order.answer)))

    def _form(self, meeting: Meeting) -> tuple[RankGroup, int]:
        """Meet the others, and agree on the greatest wave. In a thread of its own; this rank is apart."""
        group = self._groups.form(meeting)
        try:
            all_numbers = group.swap_numbers((self._machine.wave, self._weights, self._has_stepped))
            ranks = [RankWeights(number, bool(has_stepped)) for _, number, has_stepped in all_numbers]
            check_weights(ranks, meeting.rank)
        except (PeersLost, FailedPrecondition):
            group.close()
            raise
        if self._is_closed:
            group.close()
        return group, max(wave for wave, _, _ in all_numbers)

    def _take_formed(self, formed: Future[tuple[RankGroup, int]], answer: Future[None]) -> None:
        self._is_forming = False
        error = formed.exception()
        if isinstance(error, PeersLost):
            logger.warning("the ranks have not met", extra={"cause": str(error)})
            answer.set_exception(Aborted(f"the ranks have not met: {error}", reason="RANKS_NOT_MET"))
            self._change_over()
            return
        if isinstance(error, FailedPrecondition):
            if error.message != self._complaint:
                self._complaint = error.message
                logger.error("ranks with different weights do not meet", extra={"cause": error.message})
            answer.set_exception(error)
            self._change_over()
            return
        if error is not None:
            raise error
        group, wave = formed.result()
        meeting = group.meeting
        self._group, self._has_stepped, self._complaint = group, True, ""
        self._machine.form(meeting.generation, wave)
        logger.info(
            "lockstep group formed",
            extra={
                "generation": meeting.generation,
                "rank": meeting.rank,
                "size": meeting.size,
                "wave": wave,
                "expert_bytes": self._shards.num_bytes,
            },
        )
        self._note()
        answer.set_result(None)

    def _all_resumed(self, group: RankGroup) -> None:
        if group is self._group and self._is_resuming:
            self._is_resuming = False
            self._machine.all_resumed()
            self._note()

    def _lost(self, group: RankGroup) -> None:
        if group is self._group:
            self._is_losing = True
            self._leave_lost_group()

    def _leave_lost_group(self) -> None:
        # The loop finishes what it has launched; steps of a wave that has ended may still be among that.
        if self._is_losing and not self._num_in_flight:
            self.leave_group(PeersLost("a rank is gone that was to resume, or has other weights"))

    def _close_group(self) -> None:
        group, self._group = self._group, None
        self._is_resuming = self._is_losing = False
        if group is not None:
            group.close()

    def _note(self) -> None:
        """Tell of a new standing, where it is one."""
        machine, meeting = self._machine, self.meeting
        is_awaited = meeting is not None and meeting.size > 1 and machine.state is not LockstepState.QUIET
        now = RankStatus(machine.state, machine.wave, machine.asks, machine.generation, is_awaited)
        if now == self._rank_status:
            return
        self._rank_status = now
        for listener in self._listeners:
            listener(self._rank_status)
