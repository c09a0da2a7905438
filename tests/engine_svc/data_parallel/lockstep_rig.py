"""Lockstep engines in threads: real loops, schedulers, machines and drivers over a group in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.errors import PeersLost
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.data_parallel.driver import LockstepDriver, PreparedGeneration, RankStatus
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.wave import Vote, WaveMachine
from engine_svc.loop.answer import give
from engine_svc.loop.controls import EngineControls
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Call, Inbox, LoopStats, StatsSnapshot, Stop
from engine_svc.loop.pause import PauseMode
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.fakes import FakeExecutor, FakePendingStep
from tests.engine_svc.loop.controlled_rig import FakeRunners
from tests.engine_svc.loop.frontend import Frontend
from tests.engine_svc.loop.test_engine import prompt_of
from triptych_kit.clock import FakeClock

MAX_MODEL_LEN = 1200
# Longer than anything takes here, however busy the machine: a test that runs into it has failed.
PATIENCE_S = 60.0


class Meetings:
    """Where ranks meet in memory. `on_count` sees each vote of each rank before it is counted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.on_count: Callable[[int, Vote], None] = lambda rank, vote: None
        self._shared: dict[int, _Shared] = {}

    def shared(self, meeting: Meeting) -> _Shared:
        """What the ranks of that generation have in common."""
        with self.changed:
            return self._shared.setdefault(meeting.generation, _Shared(self, meeting.size))


class _Shared:
    """One generation: which rank has come to which point, with what."""

    def __init__(self, meetings: Meetings, size: int) -> None:
        self._meetings = meetings
        self._size = size
        self._come: dict[tuple[str, int], dict[int, object]] = {}
        self._waiting: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._weights: set[int] = set()  # of those that have resumed
        self.is_closed = False

    def come(self, point: tuple[str, int], rank: int, value: object = None) -> None:
        with self._meetings.changed:
            self._come.setdefault(point, {})[rank] = value
            self._meetings.changed.notify_all()

    def wait(self, point: tuple[str, int]) -> list[object]:
        """What all have brought, in order of the ranks."""
        with self._meetings.changed:
            come = self._come.setdefault(point, {})
            self._meetings.changed.wait_for(lambda: len(come) == self._size or self.is_closed, PATIENCE_S)
            if len(come) < self._size:
                raise PeersLost(f"only {sorted(come)} of {self._size} ranks came to {point}")
            return [come[rank] for rank in sorted(come)]

    def resume(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        with self._meetings.changed:
            self._waiting.append((done, lost))
            self._weights.add(weights)
            are_lost, are_all = self.is_closed, len(self._waiting) == self._size
            waiting = self._waiting if are_lost or are_all else []
            if waiting:
                are_lost = are_lost or len(self._weights) > 1
                self._waiting, self._weights = [], set()
        for one, other in waiting:
            (other if are_lost else one)()

    def close(self) -> None:
        with self._meetings.changed:
            self.is_closed = True
            waiting, self._waiting = self._waiting, []
            self._meetings.changed.notify_all()
        for _, lost in waiting:
            lost()


class FakeGroup:
    """One rank's membership of a generation."""

    def __init__(self, meetings: Meetings, meeting: Meeting) -> None:
        self.meeting = meeting
        self.shared = meetings.shared(meeting)
        self._meetings = meetings
        self._num_votes = 0

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        point = ("numbers", 0)
        self.shared.come(point, self.meeting.rank, list(numbers))
        return [list(values) for values in self.shared.wait(point) if isinstance(values, list)]

    def count(self, vote: Vote) -> Vote:
        self._meetings.on_count(self.meeting.rank, vote)
        self._num_votes += 1
        point = ("vote", self._num_votes)
        self.shared.come(point, self.meeting.rank, vote)
        votes = self.shared.wait(point)
        return Vote.count([vote for vote in votes if isinstance(vote, Vote)])

    def when_all_resumed(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        self.shared.resume(weights, done, lost)

    def close(self) -> None:
        self.shared.close()


class NotifyingStatsSnapshot(StatsSnapshot):
    """Counts every post."""

    def __init__(self) -> None:
        super().__init__()
        self._posted = threading.Condition()

    def post(self, stats: LoopStats) -> None:
        with self._posted:
            super().post(stats)
            self._posted.notify_all()

    def until(self, condition: Callable[[LoopStats], bool]) -> LoopStats:
        """The first statistics that make it true, these or later ones."""
        with self._posted:
            assert self._posted.wait_for(lambda: condition(self.read()), PATIENCE_S)
            return self.read()


class FakeGroups:
    """Makes such memberships; `group` is the latest."""

    host, store_port = "10.0.0.1", 7000

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self.group: FakeGroup | None = None

    def form(self, meeting: Meeting) -> FakeGroup:
        self.group = FakeGroup(self._meetings, meeting)
        self.group.shared.come(("form", 0), meeting.rank)
        self.group.shared.wait(("form", 0))
        return self.group


class FakeShards:
    """Remembers what it was asked for."""

    num_bytes = 0

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.may_release = False

    def prepare(self, rank: int, size: int, *, may_release: bool = False) -> None:
        self.asked.append((rank, size))
        self.may_release = may_release

    def adopt(self) -> None:
        self.asked.append("adopt")

    def forget(self) -> None:
        self.asked.append("forget")


class LockstepExecutor(FakeExecutor):
    """Steps that end when all ranks have launched theirs."""

    def __init__(self, groups: FakeGroups, on_launch: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(on_launch)
        self._groups = groups
        self._num_steps: dict[int, int] = {}
        self.num_idle = 0

    def launch(self, plan: StepPlan) -> FakePendingStep:
        pending = super().launch(plan)
        group = self._groups.group
        if group is None or group.shared.is_closed:
            raise PeersLost("there is no group")
        generation = group.meeting.generation
        number = self._num_steps[generation] = self._num_steps.get(generation, 0) + 1
        self.num_idle += not plan.request_ids
        group.shared.come(("step", number), group.meeting.rank)
        return _SharedStep(pending, group, number)


class _SharedStep(FakePendingStep):
    def __init__(self, own: FakePendingStep, group: FakeGroup, number: int) -> None:
        self._own, self._group, self._number = own, group, number

    def result(self) -> StepResult:
        result = self._own.result()
        self._group.shared.wait(("step", self._number))
        return result


class Rank:
    """One engine of the group, with a frontend of its own."""

    def __init__(self, meetings: Meetings, *, max_in_flight: int = 2) -> None:
        self.meetings = meetings
        self.groups, self.shards = FakeGroups(meetings), FakeShards()
        self.executor = LockstepExecutor(self.groups)
        self.inbox, self.stats_snapshot, self.clock = Inbox(1000), NotifyingStatsSnapshot(), FakeClock()
        self.frontend = Frontend()
        self.error: Exception | None = None
        self.is_alive = True
        self.driver = LockstepDriver(
            machine=WaveMachine(),
            groups=self.groups,
            shards=self.shards,
            post=self.post,
        )
        scheduler = build_core(
            SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=16,
                max_num_batched_tokens=64,
                async_scheduling=max_in_flight > 1,
                max_steps_in_flight=max_in_flight,
            ),
            CacheConfig(2000, (FullAttention(4),)),
        ).scheduler
        self.engine = Engine(
            scheduler=scheduler,
            executor=self.executor,
            inbox=self.inbox,
            stats_snapshot=self.stats_snapshot,
            clock=self.clock,
            lockstep=self.driver,
            max_in_flight=max_in_flight,
            at_end=(self.driver.close,),
        )
        self.controls = EngineControls(
            loop=self.engine,
            scheduler=scheduler,
            ranks=FakeRunners(),
            clock=self.clock,
            lockstep=self.driver,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def post(self, work: Callable[[], None]) -> None:
        self.inbox.put(Call(work))

    def ask(self, work: Callable[[], object]) -> object:
        """Have it done in the engine thread; what it returned."""
        answer: Future[object] = Future()
        self.post(lambda: answer.set_result(work()))
        return answer.result(PATIENCE_S)

    def add(self, handle: int, *, max_tokens: int = 5, deadline_at: float | None = None) -> None:
        prompt = prompt_of(handle)
        sampling = SamplingParams(max_tokens=max_tokens, seed=handle)
        request = Request(f"r{handle}", list(prompt), len(prompt), sampling)
        assert self.inbox.put(Add(request, self.frontend.outbox, handle, deadline_at))

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Future[None]:
        answer: Future[None] = Future()
        self.post(lambda: self.controls.serve(lambda: self.controls.pause_controller.pause(mode, answer)))
        return answer

    def resume(self) -> None:
        self.post(lambda: self.controls.serve(self.controls.pause_controller.resume))

    def sleep(self, level: int) -> Future[None]:
        answer: Future[None] = Future()
        pause_controller = self.controls.pause_controller
        self.post(lambda: self.controls.serve(lambda: pause_controller.sleep(level, PauseMode.KEEP, answer)))
        return answer

    def update_weights(self) -> None:
        self.call(lambda: self.controls.update_weights(None, ""))

    def call(self, work: Callable[[], None]) -> None:
        """Make an operator's call; raises its error."""
        answer: Future[None] = Future()
        self.post(lambda: self.controls.serve(lambda: give(answer, work)))
        answer.result(PATIENCE_S)

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception as error:  # noqa: BLE001  The test reports whatever ends the loop.
            self.error = error


class Cluster:
    """Ranks in threads, and a coordinator that starts waves and forms generations where it sees a reason."""

    def __init__(self, size: int, *, max_in_flight: int = 2) -> None:
        self.meetings = Meetings()
        self.ranks = [Rank(self.meetings, max_in_flight=max_in_flight) for _ in range(size)]
        self.generation = 0
        self.reforms = True
        self._changed = threading.Condition()
        self._num_changes = 0
        self._is_over = False
        self._coordinator = threading.Thread(target=self._coordinate, daemon=True)
        for rank in self.ranks:
            rank.driver.subscribe(self._on_rank_status)
            rank.thread.start()

    def __enter__(self) -> Cluster:
        self._coordinator.start()
        self.until(lambda: all(rank.driver.rank_status.generation for rank in self.ranks))
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._coordinator.join(PATIENCE_S)
        for rank in self.ranks:
            rank.inbox.put(Stop())
        for rank in self.ranks:
            rank.thread.join(PATIENCE_S)
            assert not rank.thread.is_alive()
            assert rank.error is None

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of standing makes it true."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S)

    def form(
        self, ranks: Sequence[Rank], leaving: Sequence[Rank] = (), *, lost_generation: int = 0
    ) -> list[Future[None]]:
        """Have these change over to a new generation, and the leaving ones leave; their answers."""
        self.generation += 1
        generation = self.generation
        orders: list[tuple[Rank, PreparedGeneration]] = [
            (rank, PreparedGeneration(generation, None)) for rank in leaving
        ]
        for index, rank in enumerate(ranks):
            meeting = Meeting(generation, index, len(ranks), "10.0.0.1", 7000)
            rank.ask(partial(rank.driver.supersede, generation))
            rank.driver.prepare(meeting)
            orders.append((rank, PreparedGeneration(generation, meeting)))
        answers: list[Future[None]] = []
        for rank, prepared in orders:
            answers.append(Future())
            rank.post(partial(rank.driver.commit, prepared, answers[-1], lost_generation))
        return answers

    def _on_rank_status(self, rank_status: RankStatus) -> None:
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def _has_changed_since(self, seen: int) -> bool:
        return self._is_over or self._num_changes != seen

    def _coordinate(self) -> None:
        seen = -1
        while not self._is_over:
            with self._changed:
                # What was refused a moment ago may be taken now.
                self._changed.wait_for(partial(self._has_changed_since, seen), 0.01)
                seen = self._num_changes
            alive = [rank for rank in self.ranks if rank.is_alive]
            for asking in alive:
                rank_status = asking.driver.rank_status
                if rank_status.asks:
                    for rank in alive:
                        if rank is not asking and not rank.driver.rank_status.is_in_wave:
                            rank.post(partial(rank.driver.on_wake_signal, rank_status.wave))
            if self.reforms and all(rank.driver.rank_status.generation == 0 for rank in alive):
                wait(self.form(alive), PATIENCE_S)
