"""One engine core, its runner, and every verb of the scheduler with the checks that belong to it."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine_svc.build.engine import build_core
from engine_svc.core.request import FinishReason, InputSegment, Request, RequestOutput, RequestStatus
from engine_svc.core.step import AdmittedRequest, StepPlan, StepResult
from engine_svc.features.pins.estimator import FixedTtl
from engine_svc.features.pins.extras import JobTurn
from engine_svc.features.pins.scheduler import JobPins
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.turns import INPUT
from engine_svc.speculation.accounting import DraftGrants
from tests.engine_svc.core_state import all_blocks, num_unfinished, retained_lots
from tests.simulation.alone import Turn
from tests.simulation.broken import BrokenInvariant, expect
from tests.simulation.budgets import AdapterCap, Adapters, BudgetWatch, EncoderBudget
from tests.simulation.cache_watch import CacheWatch
from tests.simulation.features import REMOTE, HeldBlocks
from tests.simulation.history import History
from tests.simulation.invariants import check_content, check_plan, check_states, check_whole_state
from tests.simulation.paged_runner import STATES, PagedRunner
from tests.simulation.setup import Setup
from triptych_kit.telemetry.metrics import Metrics

# Of one request. It may give way again and again, but not for ever.
MAX_PREEMPTIONS = 60
BROKEN_ROW_SHARE = 0.002
PIN_TTL_S = 6.0


@dataclass(frozen=True, slots=True)
class RandomLimit:
    """Any number of drafts, in each step another."""

    rng: random.Random
    max_drafts: int

    def num_quiet_steps(self) -> int:
        return 0

    def skip(self, num_steps: int) -> None: ...

    def grant(self, rows: Sequence[Request]) -> Sequence[int]:
        """In a third of the steps none."""
        if self.rng.random() < 1 / 3:
            return ()
        return [self.rng.randrange(self.max_drafts + 1) for _ in rows]

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


class WorldClock:
    """The time of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now


class World:
    """What happens to a core, checked as it happens. Steps, time and events are up to the caller."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.watch = CacheWatch()
        self.features = HeldBlocks(self.watch)
        self.budget_watch = BudgetWatch() if setup.has_budget_watch else None
        self.adapter_cap = AdapterCap(setup.max_adapters) if setup.max_adapters else None
        self.encoder = EncoderBudget(setup.max_encoder_tokens) if setup.max_encoder_tokens else None
        budgets: list[Budget | None] = [self.budget_watch, self.encoder]
        adapters = () if self.adapter_cap is None else (Adapters(self.adapter_cap),)
        self.now = 0.0
        pins = (
            (
                JobPins(
                    FixedTtl(PIN_TTL_S),
                    WorldClock(self),
                    Metrics("test"),
                    gives_pins_first=setup.gives_pins_first,
                ),
            )
            if setup.num_jobs
            else ()
        )
        core = build_core(
            setup.scheduler,
            setup.cache,
            policy=setup.policy,
            features=(self.features, *adapters, *pins),
            budgets=[budget for budget in budgets if budget is not None],
        )
        self.scheduler, self.kv_cache = core.scheduler, core.kv_cache
        self.features.kv_cache = core.kv_cache
        for feature in pins:
            feature.wrap(core.scheduler, core.kv_cache)
        if setup.limits_drafts:
            limit = RandomLimit(rng, setup.scheduler.num_speculative_tokens)
            self.scheduler._draft_grants = DraftGrants(limit)
        self.runner = PagedRunner(
            setup.cache.groups,
            rng,
            num_drafts=setup.scheduler.num_speculative_tokens,
            overlaps=setup.scheduler.async_scheduling,
            proposes_at_launch=setup.limits_drafts,
            num_lookahead_tokens=setup.cache.num_lookahead_tokens,
            max_model_len=setup.scheduler.max_model_len,
            broken_row_share=BROKEN_ROW_SHARE if setup.has_broken_rows else 0.0,
        )
        self.num_steps = 0
        self.max_preemptions = 0  # of any request
        self.pause = PauseState.NONE
        self.is_restricted = False
        self.histories: dict[str, History] = {}  # of requests that have not ended, by id
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.ended: list[Request] = []  # for the caller to take
        self.seen: Counter[str] = Counter()
        self.journal: list[str] | None = None  # what happened, in words, where it is traced
        # By content: the digest of a prefix to its hash and back.
        self._hash_of: dict[int, bytes] = {}
        self._digest_of: dict[bytes, int] = {}

    @property
    def unfinished(self) -> list[Request]:
        return [history.request for history in self.histories.values()]

    def add(self, request: Request, *, num_remote_tokens: int = 0, is_sent: bool = False) -> bool:
        """Enter a request, unless the core refuses it."""
        request_id = request.request_id
        if request_id in self.histories:
            expect(self.scheduler.refusal(request) is not None, "idempotence", f"{request_id} is added twice")
            return False
        if self.scheduler.refusal(request) is not None:
            self.seen["refused"] += 1
            return False
        history = History(request)
        self.histories[request_id] = history
        self.runner.identities[request_id] = history.identity
        if num_remote_tokens:
            self.features.loads[request_id] = num_remote_tokens
        if is_sent:
            self.features.sends.add(request_id)
        self._note("add", request_id, len(request.token_ids), request.num_prompt_tokens, request.sampling)
        if request.job:
            request.extras[JobTurn] = JobTurn(is_last=len(request.token_ids) % 5 == 0)
        self.scheduler.add(request)
        self.seen["given"] += len(request.token_ids) > request.num_prompt_tokens
        return True

    def extend(self, request_id: str, turn: Turn | None) -> bool:
        """Give a resumable request its next turn, or note that there will be none."""
        history = self.histories[request_id]
        self._note("extend", request_id, turn)
        if turn is None:
            self._take(self.scheduler.extend(request_id, None, self.now))
            return True
        segment = InputSegment(list(turn.token_ids), turn.sampling)
        if self.scheduler.segment_refusal(request_id, segment) is not None:
            self.seen["segment_refused"] += 1
            return False
        history.turns.append(turn)
        self.seen["early_segment"] += INPUT not in history.request.blockers
        self.seen["segment"] += 1
        self._take(self.scheduler.extend(request_id, segment, self.now))
        return True

    def cancel_turn(self, request_id: str) -> None:
        """Have the next token end the turn of a resumable request; without effect between two turns."""
        self._note("cancel_turn", request_id)
        history = self.histories[request_id]
        if INPUT not in history.request.blockers:
            history.cancel()
        self.scheduler.cancel_turn(request_id)

    def unblock(self, request_id: str, name: str) -> None:
        self._note("unblock", request_id, name)
        self.scheduler.unblock(request_id, name)

    def receive(self, request_id: str) -> None:
        """The KV that a request waits for has come from elsewhere."""
        self._note("receive", request_id)
        request = self.features.loading.pop(request_id)
        identity = self.histories[request_id].identity
        self.runner.receive(request.token_ids, request.num_computed_tokens, request.block_tables, identity)
        self.scheduler.unblock(request_id, REMOTE)
        self.seen["remote_load"] += 1

    def abort(self, request_ids: Sequence[str]) -> None:
        """abort-frees: at the end of this call the blocks of all of them are free, or held by others."""
        self._note("abort", request_ids)
        chosen = {
            request_id: self.histories[request_id].request
            for request_id in request_ids
            if request_id in self.histories
        }
        ref_count = all_blocks(self.kv_cache).ref_count
        holders: Counter[int] = Counter()
        for request in chosen.values():
            for table in request.block_tables:
                holders.update(filter(None, table.block_ids))
        before = {block_id: ref_count(block_id) for block_id in holders}
        in_flight = {request_id for plan, _ in self.in_flight for request_id in plan.request_ids}
        self.seen["abort"] += len(chosen)
        self.seen["abort_in_flight"] += sum(
            request.status is RequestStatus.RUNNING and request.request_id in in_flight
            for request in chosen.values()
        )
        num_held = len(self.features.held)
        outputs = self.scheduler.abort(request_ids, self.now, "test")
        if [output.request_id for output in outputs] != list(chosen):
            raise BrokenInvariant("terminal-once", f"{outputs} for the abort of {list(chosen)}")
        self._take(outputs)
        for block_ids in self.features.held[num_held:]:
            holders.subtract(block_ids)
        after = {block_id: ref_count(block_id) + holders[block_id] for block_id in holders}
        if after != before:
            raise BrokenInvariant("abort-frees", f"blocks were held {before}, now {after} less than that")

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing."""
        self._note("pause", state.value)
        self.pause = state
        self.scheduler.set_pause(state)
        self.seen[f"pause_{state.value}"] += 1

    def reset(self, *, reset_running: bool) -> None:
        """Forget all cached content; that works exactly when no block behind it is held."""
        self._note("reset", reset_running)
        num_running = len(self.scheduler.running_ids)
        was_reset = self.scheduler.reset_prefix_cache(self.now, reset_running=reset_running)
        pool = all_blocks(self.kv_cache)
        if was_reset is not (pool.num_free_blocks == pool.num_usable_blocks):
            raise BrokenInvariant(
                "kv-conservation", f"reset {was_reset}, {pool.num_free_blocks} blocks are free"
            )
        if was_reset and (any(pool.num_cached_keys for pool in self.kv_cache.pools) or self.watch.stored):
            raise BrokenInvariant("kv-conservation", "content can be found after a reset")
        if reset_running and self.scheduler.running_ids:
            raise BrokenInvariant("order", f"{self.scheduler.running_ids} run after a reset of all")
        self.seen["reset"] += was_reset
        self.seen["reset_running"] += reset_running and num_running > 0

    def launch(self) -> StepPlan:
        """Plan a step and compute it, as far as there is anything to do."""
        self.num_steps += 1
        scheduler = self.scheduler
        had_work = scheduler.has_work
        plan = scheduler.schedule(self.now)
        self._note("plan", plan)
        check_plan(
            plan,
            self.setup.scheduler,
            self.pause,
            all_blocks(self.kv_cache),
            self.setup.cache.groups,
            displaces=self.setup.policy == "fair",
        )
        if self.budget_watch is not None:
            self.budget_watch.check(plan)
        for admitted in plan.admitted:
            if not self._reads_cache(admitted) and any(map(any, admitted.block_ids)):
                raise BrokenInvariant(
                    "hash-soundness", f"{admitted.request_id} has a hit, but reads no cache"
                )
        if plan.preempted:
            self._note_preempted(plan.preempted)
        if plan.request_ids:
            self.in_flight.append((plan, self.runner.run(plan)))
        elif had_work and not (
            plan.preempted or self.in_flight or self.features.is_busy or self.is_restricted
        ):
            raise BrokenInvariant("progress", "there is work, but a step does nothing")
        return plan

    def lose_steps(self) -> None:
        """Plan as many steps as may be in flight; the new ones are never run, and nothing comes of any."""
        while len(self.in_flight) < self.setup.scheduler.max_steps_in_flight:
            plan = self.scheduler.schedule(self.now)
            self._note("lost plan", plan)
            if not plan.request_ids:
                break
            self.in_flight.append((plan, StepResult(plan.step_number, [])))
            self._note_preempted(plan.preempted)
        self.seen["lost_step"] += len(self.in_flight)
        self.in_flight.clear()
        self.runner.has_lost_plans = True
        self.scheduler.withdraw(self.now)

    def restrict(self, only: Collection[str] | None, max_num_tokens: int | None = None) -> None:
        """Let only these run, all of them without a row for the others; None: all."""
        self._note("restrict", only, max_num_tokens)
        self.is_restricted = only is not None
        self.scheduler.restrict(only, self.now, max_num_tokens)
        if only is not None and not set(self.scheduler.running_ids) <= set(only):
            raise BrokenInvariant("order", f"{self.scheduler.running_ids} run where only {only} may")
        self.seen["restrict"] += self.is_restricted

    def finish_oldest(self) -> list[RequestOutput]:
        """Hand in the result of the oldest step in flight."""
        plan, result = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, result, self.now)
        self._note("outputs", plan.step_number, outputs)
        places = {request_id: place for place, request_id in enumerate(plan.request_ids)}
        tokens = [places[output.request_id] for output in outputs if output.new_token_ids]
        if tokens != sorted(tokens):
            raise BrokenInvariant("order", f"outputs do not come in the order of rows: {outputs}")
        self._take(outputs)
        return outputs

    def check(self) -> None:
        first_starts: dict[Request, int] = {}
        for plan, _ in self.in_flight:
            for request_id, computed in zip(plan.request_ids, plan.num_computed_tokens, strict=True):
                history = self.histories.get(request_id)
                if history is not None and history.request.status is RequestStatus.RUNNING:
                    first_starts.setdefault(history.request, computed)
        check_whole_state(
            self.scheduler,
            self.kv_cache,
            self.setup.cache,
            self.unfinished,
            held=[*self.features.held, *retained_lots(self.kv_cache)],
            rows=self.runner.rows,
            first_starts=first_starts,
            watch=self.watch,
            # Those of every step in flight are counted as if they were right.
            num_drafts=self.setup.scheduler.num_speculative_tokens * self.setup.scheduler.max_steps_in_flight,
            is_loaded=self.setup.has_remote_loads,
        )
        self._check_states()

    def _check_states(self) -> None:
        if not any(isinstance(kind, STATES) for kind in self.setup.cache.groups):
            return
        for history in self.histories.values():
            digests: list[int] = []
            history.identity.extend(digests, history.request.token_ids)
            self._check_content(history.request, digests)
        check_states(self.kv_cache, self.setup.cache, self.runner.memories, self._digest_of)

    def _check_content(self, request: Request, digests: Sequence[int]) -> None:
        block_size = self.kv_cache.hasher.block_size
        check_content(request.block_hashes, digests, block_size, self._hash_of, self._digest_of)

    def check_idle(self) -> None:
        """kv-idle-zero: no request is left, and nothing is held."""
        pool = all_blocks(self.kv_cache)
        if self.histories or self.in_flight or num_unfinished(self.scheduler) or self.scheduler.has_work:
            raise BrokenInvariant("kv-idle-zero", f"{list(self.histories)} have not ended")
        if pool.num_free_blocks != pool.num_usable_blocks:
            raise BrokenInvariant(
                "kv-idle-zero", f"{pool.num_free_blocks} of {pool.num_usable_blocks} are free"
            )
        self.check()

    def let_pins_expire(self) -> None:
        """All that is pinned, as no job has a request."""
        self.now += PIN_TTL_S
        self.scheduler.on_idle(self.now)

    def counts(self) -> Counter[str]:
        """How often everything happened that a workload can be hard by."""
        seen = self.seen.copy()
        stats = self.scheduler.stats()
        seen["preemption"] = stats.num_preemptions
        seen["eviction"] = self.watch.num_evictions
        seen["hit"] = stats.prefix_hits + stats.preempted_hits
        seen["rejected_draft"] = self.runner.num_rejected_drafts
        seen["accepted_draft"] = self.runner.num_accepted_drafts
        seen["padding_draft"] = self.runner.num_padding_drafts
        seen["chunked_prefill"] = stats.num_chunked_prefills
        if self.budget_watch is not None:
            seen["give_back"] = self.budget_watch.num_given_back
            seen["priority_give_back"] = seen["give_back"] if self.setup.policy == "priority" else 0
        if self.adapter_cap is not None:
            seen["passed_over"] = self.adapter_cap.num_passed_over
        if self.encoder is not None:
            seen["encoder_clip"] = self.encoder.num_clipped
        return +seen

    def _reads_cache(self, admitted: AdmittedRequest) -> bool:
        """Whether blocks of its own, or of others, may be there when a request is admitted."""
        request = self.histories[admitted.request_id].request
        holds = request.is_resumable or len(self.histories[request.request_id].turns) > 1
        is_loaded = self.setup.has_remote_loads
        caches = self.setup.cache.enable_prefix_caching and not admitted.sampling.skip_reading_prefix_cache
        return caches or holds or is_loaded

    def _note_preempted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self.histories[request_id].request
            self.max_preemptions = max(self.max_preemptions, request.num_preemptions)
            if request.num_preemptions > MAX_PREEMPTIONS:
                raise BrokenInvariant(
                    "progress", f"{request_id} was preempted {request.num_preemptions} times"
                )

    def _note(self, *words: object) -> None:
        if self.journal is not None:
            self.journal.append(f"{self.num_steps}: {' '.join(map(str, words))}")

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            history = self.histories.get(output.request_id)
            if history is None:
                raise BrokenInvariant("terminal-once", f"{output} comes for a request that has ended")
            history.take(output)
            if history.has_ended:
                self._end(history, output)

    def _end(self, history: History, output: RequestOutput) -> None:
        request = history.request
        reason = request.finish_reason
        del self.histories[request.request_id]
        if reason is None or reason is not output.finish_reason or request.block_tables:
            raise BrokenInvariant("terminal-once", f"{request.request_id} is {request.status} after {output}")
        self.ended.append(request)
        history.check(self.setup.scheduler.max_model_len)
        digests: list[int] = []
        history.identity.extend(digests, request.token_ids)
        self._check_content(request, digests)
        self.seen[f"ends_by_{reason.value}"] += 1
        self.seen["turn_ended"] += len(history.endings) - 1
        self.seen["turn_cancelled"] += sum(reason is FinishReason.ABORT for reason, _ in history.endings[:-1])
        self.seen["retained"] += request.job in self.kv_cache.retained
