"""Lets recorded scheduling cases drive the scheduler: `make(config)` gives an engine that speaks dicts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import (
    AlignedState,
    ChunkedLocal,
    EveryState,
    FullAttention,
    SingleState,
    SlidingWindow,
)
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import ContentSpan, FinishReason, InputSegment, Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.adapters.extras import AdapterUse
from engine_svc.features.adapters.scheduler import AdapterLimits
from engine_svc.features.media.extras import KEY_PREFIX, EncoderWork
from engine_svc.features.media.scheduler import EncoderSteps, replayed
from engine_svc.features.sched_trace.recorded_case import content_spans, encoder_options
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from tests.conformance.grammars import BLOCKER, Grammars
from triptych_kit.clock import MonotonicClock
from triptych_kit.telemetry.metrics import Metrics

STATES = {
    "none": lambda group: SingleState(group["block_size"], group["speculative_blocks"]),
    "align": lambda group: AlignedState(group["block_size"], group["speculative_blocks"]),
    "all": lambda group: EveryState(group["block_size"]),
}
KINDS = {
    "full": lambda group: FullAttention(group["block_size"]),
    "sliding": lambda group: SlidingWindow(group["block_size"], group["sliding_window"]),
    "chunked_local": lambda group: ChunkedLocal(group["block_size"], group["chunk"]),
    "state": lambda group: STATES[group["mode"]](group),
}

# What a case may need besides a scheduler, one feature a line: its cases are replayed from then on.
CAPABILITIES = (
    "adapters",
    "chunked_local",
    "grammar",
    "media",
    "pipeline",
    "reset",
    "sessions",
    "state",
)


def capabilities() -> tuple[str, ...]:
    return CAPABILITIES


def make(config: dict[str, Any]) -> ReplayEngine:
    return ReplayEngine(config)


class ReplayEngine:
    """A scheduler whose model is the recording."""

    def __init__(self, config: dict[str, Any]) -> None:
        groups = tuple(KINDS[group["kind"]](group) for group in config["kv_groups"])
        self._groups = groups
        self._grammars = Grammars(is_async=config["async_scheduling"])
        self._reached: list[str] = []
        self._is_paused = False
        self._failed: set[str] = set()  # whose grammars failed, and which are still waiting
        self._limits = (config["max_num_seqs"], config["max_num_batched_tokens"])
        scheduler = SchedulerConfig(**_of(SchedulerConfig, config), holds_idle=True)
        cache = CacheConfig(config["num_gpu_blocks"], groups, **_of(CacheConfig, config))
        features: list[SchedulerFeature] = [self._grammars]
        if max_adapters := config.get("max_adapters"):
            context = SchedulerContext(
                MonotonicClock(), lambda work: work(), scheduler, cache, Metrics("engine")
            )
            features.append(AdapterLimits(max_adapters, max_adapters, context))
        self._encoder: EncoderSteps | None = None
        self._reported: list[str] = []  # of the encoder's outputs that are evicted
        if (options := encoder_options(config)) is not None:
            self._encoder = replayed(options)
            features.append(self._encoder)
        core = build_core(scheduler, cache, policy=config["policy"], features=features)
        self._scheduler, self._kv_cache = core.scheduler, core.kv_cache
        self._plans: list[StepPlan] = []
        self._finished: set[str] = set()
        self._seen: set[str] = set()
        self._begun: set[str] = set()  # with a first output

    def add(self, request: dict[str, Any]) -> None:
        options = _of(SamplingParams, request) | {"stop_token_ids": frozenset(request["stop_token_ids"])}
        sampling = SamplingParams(**options, skip_reading_prefix_cache=request["skip_prefix_lookup"])
        prompt, salt = request["prompt"].copy(), request["cache_salt"] or ""
        order = {"priority": request["priority"], "arrival_at": request["arrival_time"]}
        adapter = request.get("adapter")
        keys = () if adapter is None else (AdapterUse(adapter, "", digest=adapter).cache_key,)
        added = Request(
            request["id"], prompt, len(prompt), sampling, cache_salt=salt, extra_keys=keys, **order
        )
        added.is_resumable = request.get("session", False)
        added.spans = tuple(ContentSpan(**span) for span in content_spans(request))
        self._grammars.note(added, request.get("grammar"))
        self._scheduler.add(added)

    def extend(self, event: dict[str, Any]) -> None:
        options = _of(SamplingParams, event) | {"stop_token_ids": frozenset(event["stop_token_ids"])}
        spans = tuple(ContentSpan(**span) for span in content_spans(event))
        sampling, arrival_at = SamplingParams(**options), event["arrival_time"]
        segment = InputSegment(event["prompt"].copy(), sampling, arrival_at, spans=spans)
        self._scheduler.extend(event["id"], segment, now=0.0)

    def close(self, request_id: str) -> None:
        self._note_finished(self._scheduler.extend(request_id, None, now=0.0))

    def grammar_ready(self, request_id: str) -> None:
        self._scheduler.unblock(request_id, BLOCKER)

    def grammar_failed(self, request_id: str) -> None:
        self._failed.add(request_id)

    def late_drafts(self, model: dict[str, Any]) -> dict[str, Any]:
        return self._grammars.late(self._plans[model["for_step"]], model["drafts"])

    def abort(self, request_ids: list[str]) -> None:
        self._note_finished(self._scheduler.abort(request_ids, now=0.0))

    def set_pause(self, state: str) -> None:
        self._scheduler.set_pause(PauseState(state))
        self._is_paused = PauseState(state) is not PauseState.NONE

    def reset_prefix_cache(self, running: bool) -> bool:
        return self._scheduler.reset_prefix_cache(now=0.0, reset_running=running)

    def reset_encoder_cache(self) -> None:
        assert self._encoder is not None, "a case without media resets no outputs of an encoder"
        self._encoder.cache.clear()
        # A case names what was evicted for lack of room alone.
        self._reported = self._encoder.cache.evicted.copy()

    def encoder_slots(self) -> list[int] | None:
        if self._encoder is None:
            return None
        return [self._encoder.cache.num_free, self._encoder.cache.num_reclaimable]

    def schedule(self) -> dict[str, Any]:
        drafts = self._blocks_of_drafts()
        waiting, holders = self._scheduler.waiting_ids, set(self._scheduler._queues._holders)
        plan = self._scheduler.schedule(now=0.0)
        self._plans.append(plan)
        self._note_reached(plan, waiting)
        taken = {admitted.request_id: admitted.block_ids for admitted in plan.admitted}
        finished, self._finished = self._finished, set()
        seen = self._seen.copy()
        self._seen.update(taken)
        spec = zip(plan.request_ids, plan.draft_token_ids, strict=True)
        none: list[list[int]] = [[]] * self._kv_cache.num_groups
        # Of blocks that a request holds already a case lists none.
        taken |= dict.fromkeys(holders.intersection(taken), none)
        blocks = zip(plan.request_ids, plan.new_block_ids, strict=True)
        return {
            "scheduled": list(zip(plan.request_ids, plan.num_tokens, strict=True)),
            "new": [request_id for request_id in taken if request_id not in seen],
            "resumed": [request_id for request_id in taken if request_id in seen],
            "continued": [request_id for request_id in plan.request_ids if request_id not in taken],
            "preempted": plan.preempted,
            "finished": sorted(finished),
            "computed": dict(zip(plan.request_ids, plan.num_computed_tokens, strict=True)),
            "spec": {request_id: drafts for request_id, drafts in spec if drafts},
            "blocks": {
                # The placeholder, 0, is no block.
                name: {
                    "hit": _blocks(taken.get(name, none)),
                    "new": _blocks(new or none, drafts.get(name, ())),
                }
                for name, new in blocks
            },
            "free_blocks": self.free_blocks(),
            **({"masked": self._grammars.masked(plan)} if self._grammars.is_used else {}),
            **({} if self._encoder is None else self._encoded(plan, self._encoder)),
        }

    def _encoded(self, plan: StepPlan, encoder: EncoderSteps) -> dict[str, Any]:
        """What the encoder computes, and what was evicted since the decision before."""
        work = plan.extras.get(EncoderWork, EncoderWork((), tuple(encoder.cache.evicted)))
        evicted = [key.removeprefix(KEY_PREFIX) for key in work.evicted if key not in self._reported]
        self._reported = encoder.cache.evicted.copy()
        return {
            "encoder": {row.request_id: list(row.items) for row in work.rows},
            "encoder_evicted": evicted,
        }

    def update(self, model: dict[str, Any]) -> dict[str, Any]:
        plan = self._plans[model["for_step"]]
        sampled = [model["sampled"].get(request_id, []) for request_id in plan.request_ids]
        drafts = self._grammars.cut(model.get("drafts") or {}, model["sampled"])
        result = StepResult(plan.step_number, sampled, drafts)
        self._grammars.end_step(plan)
        outputs = self._scheduler.update(plan, result, now=0.0)
        # An engine ends them at once: here at the time at which the reference does.
        failed, self._reached = self._reached, []
        if self._encoder is not None:
            failed += sorted(self._encoder.budget.conflicts)
            self._encoder.budget.conflicts.clear()
        ended = self._scheduler.abort(failed, now=0.0, reason=FinishReason.ERROR)
        for output in ended:
            output.first = None
        outputs += ended
        for output in outputs:
            # A case has it in the first turn of a session alone.
            if output.request_id in self._begun:
                output.first = None
            elif output.first is not None:
                self._begun.add(output.request_id)
        freed = self._note_finished(outputs)
        return {"outputs": [_as_recorded(output) for output in outputs], "freed": freed}

    def free_blocks(self) -> int:
        return self._kv_cache.num_free_blocks

    def queue_lengths(self) -> dict[str, int]:
        return {name: len(ids) for name, ids in self.queue_ids().items()}

    def queue_ids(self) -> dict[str, list[str]]:
        return {"waiting": self._scheduler.waiting_ids, "running": self._scheduler.running_ids}

    def _note_reached(self, plan: StepPlan, waiting: list[str]) -> None:
        """Note the failed requests that the admission has come to: they end with the next update."""
        max_num_seqs, max_num_tokens = self._limits
        admitted = {entry.request_id for entry in plan.admitted}
        tokens = dict(zip(plan.request_ids, plan.num_tokens, strict=True))
        num_running = len(self._scheduler.running_ids) - len(admitted)
        num_tokens = sum(count for name, count in tokens.items() if name not in admitted)
        for name in () if plan.preempted or self._is_paused else waiting:
            if num_running >= max_num_seqs or num_tokens >= max_num_tokens:
                return
            if name in admitted:
                num_running, num_tokens = num_running + 1, num_tokens + tokens[name]
            elif name in self._failed:
                self._failed.remove(name)
                self._reached.append(name)
            elif not self._is_blocked(name):
                return

    def _blocks_of_drafts(self) -> dict[str, list[int]]:
        """The blocks by request id that a table lists again where the state moves on to them."""
        blocks: dict[str, list[int]] = {}
        for request in self._scheduler._queues.requests.values():
            for group, table in zip(self._groups, request.block_tables, strict=False):
                if isinstance(group, AlignedState) and group.num_speculative_blocks:
                    blocks.setdefault(request.request_id, []).extend(
                        table.block_ids[-group.num_speculative_blocks :]
                    )
        return blocks

    def _is_blocked(self, name: str) -> bool:
        return self._scheduler._queues.waiting.blocked(name) is not None

    def _note_finished(self, outputs: list[RequestOutput]) -> list[str]:
        for output in outputs:
            if output.continues:
                # Each turn of a session is new.
                self._seen.discard(output.request_id)
        finished = [
            output.request_id
            for output in outputs
            if output.finish_reason is not None and not output.continues
        ]
        self._finished.update(finished)
        return finished


def _blocks(groups: list[list[int]], held: Sequence[int] = ()) -> list[list[int]]:
    """The blocks of each group, without placeholders and those that the request had already."""
    return [[block_id for block_id in block_ids if block_id and block_id not in held] for block_ids in groups]


def _of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass by the same name."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _as_recorded(output: RequestOutput) -> dict[str, Any]:
    reason = output.finish_reason
    recorded = {"id": output.request_id, "tokens": output.new_token_ids, "stop_reason": output.stop_token_id}
    recorded["finish"] = None if reason is None else reason.value
    if output.num_cached_tokens is not None:
        recorded["cached_tokens"] = output.num_cached_tokens
    return recorded
