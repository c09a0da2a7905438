"""A traced scheduler without a model, and random traffic for it."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from engine_svc.build.engine import Core, build_core
from engine_svc.build.features import replayed_features
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import FinishReason, InputSegment, Request, RequestOutput, Verdict
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.sched_trace.records import Record, Setup, encode
from engine_svc.features.sched_trace.replay import Run, replay
from engine_svc.features.sched_trace.scheduler import SchedTrace
from engine_svc.loop.protocols import EngineScheduler
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.feature import SchedulerFeature
from triptych_kit.clock import FakeClock

EOS = 2
SCHEDULER = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=6)
CACHE = CacheConfig(num_blocks=26, groups=(FullAttention(4),))
SETUP = Setup(SCHEDULER, CACHE)


class OddEnds(SchedulerFeature):
    """Ends some requests at a token, with or without it."""

    def on_add(self, request: Request) -> None:
        request.needs_verdict = len(request.token_ids) % 3 == 0

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        token = request.token_ids[-1]
        if token % 5:
            return None
        reason = (FinishReason.STOP, FinishReason.ERROR)[token % 2]
        return Verdict(reason, None if token < 18 else len(output.new_token_ids) - 1)


class Keeper(SchedulerFeature):
    """Retains blocks of some requests for a while, under the keys of their jobs, and gives some up."""

    def __init__(self) -> None:
        self._kv_cache: KVCache | None = None
        self._until: dict[str, float] = {}
        self._now = 0.0
        self.seen: Counter[str] = Counter()

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        self._kv_cache = kv_cache
        return scheduler

    def on_step(self, now: float) -> float | None:
        self._now = now
        for key in [key for key, until in self._until.items() if until <= now]:
            self._release(key, "step")
        return None

    def on_plan(self, plan: StepPlan) -> None:
        if plan.step_number % 7 == 0:
            self._release_first("plan")

    def on_note(self, request_id: str, note: Extra, now: float) -> None:
        self._release_first("note")

    def on_pressure(self, is_running: bool) -> bool:
        return int(self._now) % 2 == 0 and self._release_first("pressure")

    def on_exhausted(self) -> bool:
        return self._release_first("exhausted")

    def on_reset(self) -> None:
        self.seen["reset"] += len(self._until)
        self._until.clear()

    def on_finish(self, request: Request) -> None:
        if self._kv_cache is None or not request.job or len(request.token_ids) % 4 == 0:
            return
        if request.job in self._until:
            self._release(request.job, "finish")
        if self._kv_cache.retain(request.job, request, request.num_tokens):
            self._until[request.job] = self._now + len(request.token_ids) % 7

    def _release_first(self, cause: str) -> bool:
        key = next(iter(self._until), None)
        if key is not None:
            self._release(key, cause)
        return key is not None

    def _release(self, key: str, cause: str) -> None:
        assert self._kv_cache is not None
        del self._until[key]
        self._kv_cache.retained.release(key)
        self.seen[cause] += 1


def build(setup: Setup, features: Sequence[SchedulerFeature] = ()) -> Core:
    return build_core(
        setup.scheduler,
        setup.cache,
        policy=setup.policy,
        scheduler_class=setup.scheduler_class,
        features=[*features, *replayed_features(setup.features)],
    )


def replayed(records: Sequence[Record]) -> Run:
    """What the replay of a trace of one run comes to."""
    (run,) = replay(records, build)
    return run


def request(request_id: str, num_tokens: int = 6, *, max_tokens: int = 16) -> Request:
    """A request whose prompt begins like that of all others."""
    return Request(request_id, list(range(10, 10 + num_tokens)), num_tokens, SamplingParams(max_tokens))


class Tracing:
    """A traced scheduler, and the records of it."""

    def __init__(self, setup: Setup = SETUP, features: Sequence[SchedulerFeature] = ()) -> None:
        self.records: list[Record] = []
        self.num_items: list[int] = []
        self.is_open = True
        self.feature = SchedTrace(setup, FakeClock(), self)
        self.core = build(setup, [self.feature, *features])
        for feature in features:
            feature.wrap(self.core.scheduler, self.core.kv_cache)
        self.scheduler = self.feature.wrap(self.core.scheduler, self.core.kv_cache)

    def put(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None:
        # As they are in a file.
        self.records += [json.loads(encode(record)) for record in make_records()]
        self.num_items.append(num_items)

    def close(self) -> None:
        self.is_open = False

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def step(self, now: float = 0.0) -> StepPlan:
        """Plan a step and give it back, a token for each row that samples."""
        plan = self.scheduler.schedule(now)
        self.give_back(plan)
        return plan

    def give_back(self, plan: StepPlan, *, non_finite: tuple[int, ...] = ()) -> None:
        """Give back a plan, a token for each row that samples."""
        sampled = [
            [7] if samples and row not in non_finite else [] for row, samples in enumerate(plan.samples)
        ]
        self.scheduler.update(plan, StepResult(plan.step_number, sampled, {}, list(non_finite)), 0.0)

    def end(self) -> list[Record]:
        self.feature.close()
        return self.records


class Traffic:
    """Random commands, tokens and failures for a traced scheduler, in the order of an engine's loop."""

    def __init__(
        self, tracing: Tracing, config: SchedulerConfig, seed: int, *, has_turns: bool = False
    ) -> None:
        """has_turns: some requests take further input."""
        self._has_turns = has_turns
        self._resumable: list[str] = []
        self._idle: list[str] = []  # whose turn has ended
        self._scheduler = tracing.scheduler
        self._config = config
        self._rng = random.Random(seed)
        self._head = [self._rng.randrange(3, 9) for _ in range(12)]
        self._alive: list[str] = []
        self._blocked: list[str] = []
        self._num_added = 0
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._now = 1.0
        self.seen: Counter[str] = Counter()

    def run(self, num_steps: int) -> None:
        """So many steps, with commands before and during each."""
        for _ in range(num_steps):
            self._now += self._rng.random()
            self._command()
            if self._rng.random() < 0.1:
                self._scheduler.on_idle(self._now)
                self._scheduler.note("unknown", Extra(), self._now)
            plan = self._scheduler.schedule(self._now)
            self.seen["preempted"] += len(plan.preempted)
            if plan.request_ids:
                self._in_flight.append((plan, self._result(plan)))
            if len(self._in_flight) == self._config.max_steps_in_flight or not plan.request_ids:
                self._command()
                if self._in_flight and self._rng.random() < 0.01:
                    self._fail()
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        if self._in_flight:
            self._note_ends(self._scheduler.update(*self._in_flight.popleft(), self._now))

    def _fail(self) -> None:
        """A step fails: all in flight are rolled back, and one of their requests runs alone for a step."""
        rows = sorted({request_id for plan, _ in self._in_flight for request_id in plan.request_ids})
        self._in_flight.clear()
        self._scheduler.withdraw(self._now)
        self._scheduler.restrict([self._rng.choice(rows)], self._now, 5)
        plan = self._scheduler.schedule(self._now)
        if plan.request_ids:
            self._note_ends(self._scheduler.update(plan, self._result(plan), self._now))
        self._scheduler.restrict(None, self._now)
        self.seen["withdrawn"] += 1

    def _command(self) -> None:
        rng = self._rng
        for _ in range(rng.choice((0, 0, 1, 2))):
            if len(self._alive) < 14:
                self._add()
        if self._blocked and rng.random() < 0.3:
            self._scheduler.unblock(self._blocked.pop(rng.randrange(len(self._blocked))), "preparation")
            self.seen["unblocked"] += 1
        if self._alive and rng.random() < 0.08:
            ended = rng.sample(self._alive, min(len(self._alive), rng.randrange(1, 3)))
            reason = rng.choice((FinishReason.ABORT, FinishReason.ERROR))
            self._note_ends(self._scheduler.abort(iter([*ended, "unknown"]), self._now, "gone", reason))
        if self._resumable:
            self._command_turn(rng.choice(self._resumable))
        if rng.random() < 0.05:
            self._scheduler.set_pause(rng.choice([PauseState.NONE, *PauseState]))
        if rng.random() < 0.02:
            self.seen["reset"] += self._scheduler.reset_prefix_cache(
                self._now, reset_running=rng.random() < 0.5
            )

    def _command_turn(self, request_id: str) -> None:
        """Cancel the turn of a request, or close it, whether or not its turn has ended; or extend it."""
        rng = self._rng
        if rng.random() < 0.1:
            self._scheduler.cancel_turn(request_id)
        elif rng.random() < 0.1:
            self._resumable.remove(request_id)
            self._note_ends(self._scheduler.extend(request_id, None, self._now))
        elif request_id in self._idle and rng.random() < 0.5:
            self._idle.remove(request_id)
            own = [rng.randrange(3, 9) for _ in range(rng.randrange(1, 6))]
            sampling = SamplingParams(rng.randrange(1, 6), eos_token_id=EOS, repetition=RepetitionLimits(2))
            is_blocked = rng.random() < 0.2
            blockers = frozenset({"preparation"} if is_blocked else ())
            segment = InputSegment(own, sampling, rng.choice((None, self._now)), blockers=blockers)
            if self._scheduler.segment_refusal(request_id, segment) is not None:
                self._note_ends(self._scheduler.abort([request_id], self._now))
                return
            self._scheduler.extend(request_id, segment, self._now)
            self._blocked += [request_id] * is_blocked

    def _add(self) -> None:
        rng = self._rng
        own = [rng.randrange(3, 9) for _ in range(rng.randrange(1, 30))]
        prompt = self._head[: rng.choice((0, 8, 12))] + own
        request = Request(
            f"r{self._num_added}",
            prompt,
            # Some come with output, from an engine that has died.
            len(prompt) - (len(prompt) > 4 and rng.random() < 0.1),
            SamplingParams(
                max_tokens=rng.randrange(2, 20),
                temperature=rng.choice((0.0, 1.0)),
                ignore_eos=rng.random() < 0.3,
                eos_token_id=rng.choice((EOS, None)),
                stop_token_ids=frozenset(rng.sample(range(3, 40), rng.randrange(3))),
                skip_reading_prefix_cache=rng.random() < 0.1,
                repetition=rng.choice((None, RepetitionLimits(2))),
            ),
            priority=rng.randrange(3),
            account=rng.choice(("", "a", "b")),
            weight=rng.choice((1, 3)),
            job=f"job {self._num_added % 4}" if self._num_added % 3 else "",
            arrival_at=rng.random() * 10,
            cache_salt=rng.choice(("", "", "", "salt")),
            extra_keys=rng.choice(((), (), ("adapter",))),
        )
        if rng.random() < 0.1:
            request.blockers.add("preparation")
            self._blocked.append(request.request_id)
        if self._has_turns and rng.random() < 0.5:
            request.is_resumable = True
            self._resumable.append(request.request_id)
        self._num_added += 1
        self._alive.append(request.request_id)
        self._scheduler.add(request)

    def _result(self, plan: StepPlan) -> StepResult:
        rng = self._rng
        sampled: list[list[int]] = []
        drafts: dict[str, list[int]] = {}
        broken = []
        num_drafts: list[int] = []
        for row, (request_id, samples, proposed) in enumerate(
            zip(plan.request_ids, plan.samples, plan.draft_token_ids, strict=True)
        ):
            # Drafts without a value that pad a row are never right, those of a step in flight may be.
            known = proposed if self._config.async_scheduling or -1 not in proposed else []
            if self._config.drafts_at_launch:
                # A proposer may have fewer than the plan allows.
                known = proposed[: rng.randrange(len(proposed) + 1)]
            num_drafts.append(len(known))
            accepted = [rng.randrange(3, 40) if token < 0 else token for token in known]
            num_accepted = rng.randrange(len(accepted) + 1)
            is_broken = rng.random() < 0.005
            if is_broken:
                broken.append(row)
            is_sampled = samples and not is_broken
            sampled.append([*accepted[:num_accepted], rng.randrange(EOS, 40)] if is_sampled else [])
            is_known_later = not self._config.async_scheduling and not self._config.drafts_at_launch
            if self._config.num_speculative_tokens and is_known_later:
                drafts[request_id] = [rng.randrange(3, 40) for _ in range(rng.randrange(3))]
        result = StepResult(plan.step_number, sampled, drafts, broken)
        if self._config.drafts_at_launch:
            result.num_drafts = num_drafts
        return result

    def _note_ends(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.seen[output.finish_reason.value] += 1
                if output.continues:
                    self.seen["turns"] += 1
                    self._idle.append(output.request_id)
                    continue
                self._alive.remove(output.request_id)
                if output.request_id in self._resumable:
                    self._resumable.remove(output.request_id)
