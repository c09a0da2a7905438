"""The lockstep of one engine: joins wave machine, process group and expert shards for the engine loop.

Belongs to the engine thread, apart from properties that any thread may read. Knows no wire.
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
from triptych_kit.errors import Aborted, FailedPrecondition

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A consistent snapshot of a rank's state, for other threads."""

    state: LockstepState = LockstepState.APART
    wave: int = 1  # the one that runs, or the next
    asks: bool = False  # it has begun the wave and waits for the others
    generation: int = 0  # of the process group; 0: none
    # Other ranks may want to step and cannot without this one; False while all have agreed to pause.
    is_awaited: bool = False

    @property
    def is_in_wave(self) -> bool:
        """Whether this rank steps with the others."""
        return self.state is LockstepState.RUNNING


@dataclass(frozen=True, slots=True)
class PreparedGeneration:
    """A generation that this engine can change to. meeting: None if it is no member."""

    generation: int
    meeting: Meeting | None


@dataclass(frozen=True, slots=True)
class _Order:
    """An order to change to a generation, and the future of its result."""

    prepared: PreparedGeneration
    answer: Future[None]
    lost_generation: int  # the last one that cannot vote any more, as a member has ended; 0: none


class LockstepDriver:
    """The lockstep of one engine.

    post: runs a call in the engine thread, between two steps; may be called by any thread.
    parallel_config_hash: equal for engines that can step together.
    weights_digest: of the present weights, in hex; ranks with other weights are not stepped with.
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
        self._is_resuming = False  # has sent so to the others and waits for them
        self._is_closed = False
        self._is_losing = False  # leaves its group as soon as nothing is in flight
        self._has_stepped = False  # or could have: it was in a group
        self._weights = number_of(weights_digest)
        self._logged_mismatch = ""  # the last logged error about different weights
        self._rank_status = RankStatus(wave=machine.wave)
        self._listeners: list[Callable[[RankStatus], None]] = []
        # This thread may wait for other ranks, while the loop continues with what needs no step.
        self._former = ThreadPoolExecutor(1, thread_name_prefix="rank-group")
        self.parallel_config_hash = parallel_config_hash
        self.num_votes = 0
        self.num_idle_steps = 0

    # For any thread.

    @property
    def rank_status(self) -> RankStatus:
        return self._rank_status

    @property
    def host(self) -> str:
        """The address of this engine's store."""
        return self._groups.host

    @property
    def store_port(self) -> int:
        return self._groups.store_port

    @property
    def meeting(self) -> Meeting | None:
        """The meeting of the present generation; None: there is none."""
        group = self._group
        return None if group is None else group.meeting

    def subscribe(self, listener: Callable[[RankStatus], None]) -> None:
        """Call `listener` with each new status, in the engine thread. Call this before the loop runs."""
        self._listeners.append(listener)

    def prepare(self, meeting: Meeting, *, may_release: bool = False) -> None:
        """Load the experts that this engine needs in that generation. For the one thread that prepares.

        may_release: `supersede` has returned that nothing can run with the present experts. Raises ValueError
        or OSError.
        """
        self._shards.prepare(meeting.rank, meeting.size, may_release=may_release)

    def forget(self) -> None:
        """Drop what was prepared for a generation that is cancelled. For the one thread that prepares."""
        self._shards.forget()

    def break_off(self, lost_generation: int) -> None:
        """End every wait for the ranks of a group that has lost a member; for any thread.

        Ranks that have agreed to pause are not waiting, and detect the loss when they resume.
        """
        group = self._group
        is_lost = group is not None and group.meeting.generation <= lost_generation
        if is_lost and group is not None and self._rank_status.state is not LockstepState.QUIET:
            group.close()

    # For the loop.

    @property
    def needs_idle_step(self) -> bool:
        """Whether this rank has to step even without requests of its own."""
        return self._machine.needs_idle_step

    def wants_step(self, has_work: bool) -> bool:
        """Whether a step would be launched now, for requests of this rank or of another; changes nothing."""
        return self._machine.wants_step(has_work)

    def may_step(self, has_work: bool) -> bool:
        """Whether a step may be launched now; begins a wave if there is a reason for one."""
        may_step = self._machine.may_step(has_work)
        self._note()
        return may_step

    def on_step_launched(self, *, is_idle: bool, has_work: bool) -> None:
        """Note a step; at regular intervals, vote with the other ranks. Raises PeersLost."""
        self._num_in_flight += 1
        self.num_idle_steps += is_idle
        vote = self._machine.on_step_launched(has_work)
        if vote is None:
            return
        if self._group is None:
            raise PeersLost("there is no process group for a vote")
        self.num_votes += 1
        self._machine.take(self._group.count(vote))
        self._note()

    def on_step_done(self) -> None:
        """Note that the oldest step in flight has ended."""
        self._num_in_flight -= 1
        self._machine.on_step_done()
        self._note()
        self._leave_lost_group()
        self._change_over()

    def leave_group(self, error: Exception) -> None:
        """Leave the group after a failed step or the loss of a rank, which ends every wait in it."""
        if self._machine.state is not LockstepState.APART:
            logger.warning("left the lockstep group", extra={"cause": f"{type(error).__name__}: {error}"})
        self._close_group()
        self._machine.leave_group()
        self._num_in_flight = 0
        self._note()
        # Posted, as the steps in flight are rolled back only after this.
        self._post(self._change_over)

    # For calls from outside, in the engine thread.

    @property
    def is_quiet(self) -> bool:
        """Whether no rank can step before this one resumes."""
        return self._machine.state is LockstepState.QUIET and not self._is_resuming

    def check_quiet(self, *, or_apart: bool = False) -> None:
        """Raise FailedPrecondition, with the reason, while the ranks may step with this engine's model.

        or_apart: also return if this rank is in no group, as the call ends before it can be in one.
        """
        is_apart = self._machine.state is LockstepState.APART
        if self.is_quiet or (or_apart and is_apart and not self._is_forming):
            return
        if is_apart:
            raise FailedPrecondition(
                "this engine is in no group at present, and may join one at any time: wait until its ranks "
                "have formed a group and are paused",
                reason="RANKS_APART",
            )
        raise FailedPrecondition(
            "this engine steps together with the other ranks of its group: pause all of them first",
            reason="RANKS_NOT_QUIET",
        )

    def note_weights(self, digest: str) -> None:
        """The weights were replaced, while this rank was paused or in no group."""
        self._weights = number_of(digest)

    def pause(self) -> None:
        """Pause this rank's requests. The ranks agree on a pause once all of them are paused."""
        self._machine.pause()
        self._note()

    def resume(self) -> None:
        """Resume this rank's requests; after an agreed pause, once all other ranks have resumed too."""
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
        """Join a wave that another rank has begun. False if it is over, or if none can run."""
        has_joined = self._machine.start(wave)
        self._note()
        return has_joined

    def on_wake_signal(self, wave: int) -> None:
        """Another rank has signaled its wave; if it cannot be joined, no answer is needed."""
        self.start(wave)

    def supersede(self, generation: int) -> bool:
        """Refuse older generations, as a newer one is about to be prepared.

        Returns whether nothing can run here before the new one is prepared and formed.
        """
        if self._next is not None and self._next.prepared.generation < generation:
            self._refuse_next(generation)
        is_apart = self._machine.state is LockstepState.APART
        return is_apart and self._next is None and not self._is_forming

    def commit(self, prepared: PreparedGeneration, answer: Future[None], lost_generation: int = 0) -> None:
        """Change to a generation as soon as all ranks of the present one can.

        A rank that is idle in a generation up to `lost_generation` does so at once, as a member has ended.
        Answered when the group is formed; with Aborted if a newer one supersedes it or the ranks do not meet.
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
        """Leave the group at the end of the loop."""
        self._is_closed = True
        self._close_group()
        self._former.shutdown(wait=False)

    def _refuse_next(self, generation: int) -> None:
        order, self._next = self._next, None
        if order is not None:
            order.answer.set_exception(Aborted(f"superseded by generation {generation}", reason="SUPERSEDED"))

    def _change_over(self) -> None:
        """Begin to form the next generation if all conditions are met."""
        order = self._next
        if order is None or self._num_in_flight or self._is_forming or self._is_closed:
            return
        machine = self._machine
        if machine.state is LockstepState.PAUSED and machine.generation <= order.lost_generation:
            self.leave_group(PeersLost(f"a member of generation {machine.generation} has ended"))
            return
        if order.prepared.generation != machine.switch_to:
            return
        # Tried once: if a rank is missing, another generation follows.
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
        """Meet the other ranks and agree on the greatest wave. In its own thread, while in no group."""
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
            logger.warning("data-parallel ranks did not form their group", extra={"cause": str(error)})
            answer.set_exception(Aborted(f"the ranks have not met: {error}", reason="RANKS_NOT_MET"))
            self._change_over()
            return
        if isinstance(error, FailedPrecondition):
            if error.message != self._logged_mismatch:
                self._logged_mismatch = error.message
                logger.error("ranks with different weights do not meet", extra={"cause": error.message})
            answer.set_exception(error)
            self._change_over()
            return
        if error is not None:
            raise error
        group, wave = formed.result()
        meeting = group.meeting
        self._group, self._has_stepped, self._logged_mismatch = group, True, ""
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
        # The loop first finishes the steps it has launched, which may be of a wave that has ended.
        if self._is_losing and not self._num_in_flight:
            self.leave_group(PeersLost("a rank ended before it resumed, or has other weights"))

    def _close_group(self) -> None:
        group, self._group = self._group, None
        self._is_resuming = self._is_losing = False
        if group is not None:
            group.close()

    def _note(self) -> None:
        """Notify listeners if the status has changed."""
        machine, meeting = self._machine, self.meeting
        is_awaited = meeting is not None and meeting.size > 1 and machine.state is not LockstepState.QUIET
        now = RankStatus(machine.state, machine.wave, machine.asks, machine.generation, is_awaited)
        if now == self._rank_status:
            return
        self._rank_status = now
        for listener in self._listeners:
            listener(self._rank_status)
