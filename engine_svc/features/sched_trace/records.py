"""The format of a trace: lines of JSON, records of three kinds, which docs/sched-trace.md describes.

The configuration, a request and an output are written as in a recorded case, with further fields.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from engine_svc.cache.attention import (
    AlignedState,
    AttentionKind,
    ChunkedLocal,
    EveryState,
    FullAttention,
    KeptState,
    SingleState,
    SlidingWindow,
)
from engine_svc.cache.block_pool import held_blocks
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import ContentSpan, FinishReason, InputSegment, Request, RequestOutput, Verdict
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import StepCosts, StepPlan
from engine_svc.scheduler.config import SchedulerConfig

FORMAT = 1
SNAPSHOT, PREFIX_CACHE, DECISION = "step_snapshot", "prefix_cache_event", "step_decision"

Record = dict[str, Any]  # a JSON object

encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class State:
    """The scheduler's state before it decides."""

    running: Sequence[str]
    waiting: Sequence[str]
    free_blocks: int
    gpu_cached_blocks: int
    pinned_job_ids: Sequence[str] = ()  # keys of the blocks that are retained
    pinned_blocks: int = 0

    @property
    def num_items(self) -> int:
        return len(self.running) + len(self.waiting)


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration by which a scheduler decides."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    policy: str = "fcfs"
    scheduler_class: str = "default"
    features: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # see SchedulerContext.replayed

    def to_record(self) -> Record:
        record = asdict(self.scheduler)
        return {
            "block_size": min(kind.block_size for kind in self.cache.groups),
            "num_gpu_blocks": self.cache.num_blocks,
            "policy": self.policy,
            "scheduler_class": self.scheduler_class,
            "features": {name: dict(options) for name, options in self.features.items()},
            **record,
            "enable_prefix_caching": self.cache.enable_prefix_caching,
            "num_state_slots": self.cache.num_state_slots,
            "num_lookahead_tokens": self.cache.num_lookahead_tokens,
            "drop_last_matched_block": self.cache.drop_last_matched_block,
            "kv_groups": [_as_group(kind) for kind in self.cache.groups],
        }

    @classmethod
    def read(cls, record: Record) -> Setup:
        groups = tuple(_read_group(group) for group in record["kv_groups"])
        cache = CacheConfig(record["num_gpu_blocks"], groups, **_of(CacheConfig, record))
        options = _of(SchedulerConfig, record)
        if (costs := options.get("step_costs")) is not None:
            lists = {name: tuple(costs.get(name, ())) for name in ("counts", "seconds", "proposal_seconds")}
            options["step_costs"] = StepCosts(**{**costs, **lists})
        scheduler = SchedulerConfig(**options)
        return cls(
            scheduler,
            cache,
            record["policy"],
            record.get("scheduler_class", "default"),
            record.get("features", {}),
        )


def snapshot(step: int, at: float, state: State, setup: Setup, events: Sequence[Record]) -> Record:
    """The state before the decision of a step, and what led to it from the state after the one before."""
    return {
        "kind": SNAPSHOT,
        "step": step,
        "at": at,
        "running": list(state.running),
        "waiting": list(state.waiting),
        "free_blocks": state.free_blocks,
        "total_blocks": setup.cache.num_blocks - 1,
        "gpu_cached_blocks": state.gpu_cached_blocks,
        "cpu_free_blocks": 0,
        "cpu_total_blocks": 0,
        "cpu_cached_blocks": 0,
        "num_pinned": len(state.pinned_job_ids),
        "pinned_blocks": state.pinned_blocks,
        "pinned_job_ids": list(state.pinned_job_ids),
        "max_num_running_reqs": setup.scheduler.max_num_seqs,
        "max_num_scheduled_tokens": setup.scheduler.max_num_batched_tokens,
        "events": events,
    }


def prefix_cache_events(plan: StepPlan, jobs: Mapping[str, str]) -> list[Record]:
    """A record for each request that is admitted: how many of its tokens need not be computed.

    jobs: of requests that have one, by id.
    """
    computed = dict(zip(plan.request_ids, plan.num_computed_tokens, strict=True))
    return [
        {
            "kind": PREFIX_CACHE,
            "step": plan.step_number,
            "req_id": admitted.request_id,
            "job_id": jobs.get(admitted.request_id),
            "local_hit_tokens": computed[admitted.request_id],
            "external_hit_tokens": 0,
            "total_prompt_tokens": admitted.num_prompt_tokens,
            "num_tokens": len(admitted.token_ids),
            "connector_name": None,
            "load_kv_async": False,
        }
        for admitted in plan.admitted
    ]


def decision(plan: StepPlan, resumed: Collection[str], free_blocks: int) -> Record:
    """The record of a plan. resumed: its requests that are admitted again."""
    admitted = {entry.request_id: entry.block_ids for entry in plan.admitted}
    names = plan.request_ids
    blocks = {}
    for name, new in zip(names, plan.new_block_ids, strict=True):
        hit = [held_blocks(group) for group in admitted.get(name, ())]
        if any(new) or any(hit):
            blocks[name] = {"hit": hit or [[] for _ in new], "new": new or [[] for _ in hit]}
    drafts = zip(names, plan.draft_token_ids, strict=True)
    return {
        "kind": DECISION,
        "step": plan.step_number,
        "scheduled_new_req_ids": [name for name in names if name in admitted and name not in resumed],
        "scheduled_resumed_req_ids": [name for name in names if name in resumed],
        "scheduled_running_req_ids": [name for name in names if name not in admitted],
        "preempted_req_ids": plan.preempted,
        "num_scheduled_tokens": dict(zip(names, plan.num_tokens, strict=True)),
        "total_scheduled_tokens": plan.total_num_tokens,
        "draft_token_ids": {name: list(tokens) for name, tokens in drafts if tokens},
        "block_ids": blocks,
        "free_blocks": free_blocks,
    }


def request_record(request: Request) -> Record:
    """A new request, with copies of what changes later and all of its sampling parameters."""
    return {
        "id": request.request_id,
        "prompt": request.token_ids.copy(),
        "num_prompt_tokens": request.num_prompt_tokens,
        **_sampling_record(request.sampling),
        "priority": request.priority,
        "account": request.account,
        "weight": request.weight,
        "job": request.job,
        "arrival_time": request.arrival_at,
        "cache_salt": request.cache_salt or None,
        "extra_keys": list(request.extra_keys),
        "spans": [asdict(span) for span in request.spans],
        "num_encoder_tokens": request.num_encoder_tokens,
        "blockers": sorted(request.blockers),
        "session": request.is_resumable,
    }


def segment_record(segment: InputSegment, blockers: Collection[str]) -> Record:
    """blockers: what the turn waits for."""
    return {
        "prompt": list(segment.token_ids),
        **_sampling_record(segment.sampling),
        "arrival_time": segment.arrival_at,
        "spans": [asdict(span) for span in segment.spans],
        "blockers": sorted(blockers),
    }


def read_segment(record: Record) -> InputSegment:
    return InputSegment(
        list(record["prompt"]),
        _read_sampling(record),
        record["arrival_time"],
        blockers=frozenset(record.get("blockers", ())),
        spans=_read_spans(record),
    )


def _read_spans(record: Record) -> tuple[ContentSpan, ...]:
    spans = record.get("spans", ())
    return tuple(ContentSpan(**{**span, "tokens": tuple(span.get("tokens", ()))}) for span in spans)


def _sampling_record(sampling: SamplingParams) -> Record:
    record = asdict(sampling)
    record["stop_token_ids"] = sorted(sampling.stop_token_ids)
    record["skip_prefix_lookup"] = record.pop("skip_reading_prefix_cache")
    return record


def _read_sampling(record: Record) -> SamplingParams:
    repetition = record.get("repetition")
    options = _of(SamplingParams, record) | {
        "stop_token_ids": frozenset(record["stop_token_ids"]),
        "skip_reading_prefix_cache": record.get("skip_prefix_lookup", False),
        "repetition": None if repetition is None else RepetitionLimits(**repetition),
        "logprob_token_ids": tuple(record.get("logprob_token_ids", ())),
    }
    return SamplingParams(**options)


def read_request(record: Record) -> Request:
    """The request of a record, which may be older than some of the sampling parameters."""
    prompt = list(record["prompt"])
    return Request(
        record["id"],
        prompt,
        record.get("num_prompt_tokens", len(prompt)),
        _read_sampling(record),
        priority=record["priority"],
        account=record.get("account", ""),
        weight=record.get("weight", 1),
        job=record.get("job", ""),
        arrival_at=record["arrival_time"],
        cache_salt=record["cache_salt"] or "",
        extra_keys=tuple(record.get("extra_keys", ())),
        spans=_read_spans(record),
        num_encoder_tokens=record.get("num_encoder_tokens", 0),
        blockers=set(record.get("blockers", ())),
        is_resumable=record.get("session", False),
    )


def verdict_record(verdict: Verdict) -> Record:
    return {"reason": verdict.reason.value, "num_tokens": verdict.num_tokens}


def read_verdict(record: Record) -> Verdict:
    return Verdict(FinishReason(record["reason"]), record["num_tokens"])


def output_records(outputs: Sequence[RequestOutput]) -> list[Record]:
    """The outputs that begin or end a request; all others are the tokens that were sampled."""
    return [
        _output_record(output)
        for output in outputs
        if output.finish_reason is not None or output.num_cached_tokens is not None
    ]


def _output_record(output: RequestOutput) -> Record:
    reason = output.finish_reason
    record: Record = {
        "id": output.request_id,
        "tokens": list(output.new_token_ids),
        "finish": None if reason is None else reason.value,
        "stop_reason": output.stop_token_id,
    }
    if output.num_cached_tokens is not None:
        record["cached_tokens"] = output.num_cached_tokens
    if output.continues:
        record["continues"] = True
    return record


def _as_group(kind: AttentionKind) -> Record:
    match kind:
        case FullAttention(block_size):
            return {"kind": "full", "block_size": block_size, "sliding_window": None}
        case SlidingWindow(block_size, window):
            return {"kind": "sliding", "block_size": block_size, "sliding_window": window}
        case ChunkedLocal(block_size, chunk):
            return {"kind": "chunked_local", "block_size": block_size, "chunk": chunk}
        case KeptState(block_size, interval):
            return {"kind": "state", "block_size": block_size, "mode": "kept", "interval": interval}
        case SingleState(block_size, num_drafts):
            return _state(block_size, "none", num_drafts)
        case AlignedState(block_size, num_drafts):
            return _state(block_size, "align", num_drafts)
        case EveryState(block_size):
            return _state(block_size, "all", 0)
    raise ValueError(f"a trace has no name for {type(kind).__name__}")


def _state(block_size: int, mode: str, num_drafts: int) -> Record:
    return {"kind": "state", "block_size": block_size, "mode": mode, "speculative_blocks": num_drafts}


def _read_group(record: Record) -> AttentionKind:
    match record["kind"]:
        case "full":
            return FullAttention(record["block_size"])
        case "sliding":
            return SlidingWindow(record["block_size"], record["sliding_window"])
        case "chunked_local":
            return ChunkedLocal(record["block_size"], record["chunk"])
        case "state":
            return _read_state(record)
        case kind:
            raise ValueError(f"the attention of a group is {kind}, which is not known here")


def _read_state(record: Record) -> AttentionKind:
    match record["mode"]:
        case "kept":
            return KeptState(record["block_size"], record["interval"])
        case "none":
            return SingleState(record["block_size"], record["speculative_blocks"])
        case "align":
            return AlignedState(record["block_size"], record["speculative_blocks"])
        case "all":
            return EveryState(record["block_size"])
        case mode:
            raise ValueError(f"the states of a group are kept by {mode}, which is not known here")


def _of(kind: type[Any], record: Mapping[str, Any]) -> Record:
    """The values of a record that are fields of a dataclass by the same name."""
    return {each.name: record[each.name] for each in fields(kind) if each.name in record}
