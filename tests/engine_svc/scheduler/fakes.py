"""A scheduler with a small cache, requests for it, and steps without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import AttentionKind, FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import InputSegment, Request, RequestOutput
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.core.step import StepCosts, StepPlan, StepResult
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerFeature

EOS = 2
NEW_TOKEN = 7
STOP = 42  # ends a turn of a session


def request(
    request_id: str,
    num_tokens: int,
    *,
    max_tokens: int = 16,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
    arrival_at: float = 0.0,
    blockers: Sequence[str] = (),
    repetition: RepetitionLimits | None = None,
    salt: str | None = None,
    is_resumable: bool = False,
) -> Request:
    """A request whose prompt shares no block with that of another id, unless both have the same salt."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        eos_token_id=EOS,
        stop_token_ids=frozenset(stop_token_ids),
        repetition=repetition,
    )
    prompt = [100 + index for index in range(num_tokens)]
    return Request(
        request_id,
        prompt,
        num_tokens,
        sampling,
        priority=priority,
        arrival_at=arrival_at,
        cache_salt=request_id if salt is None else salt,
        is_resumable=is_resumable,
        blockers=set(blockers),
    )


def session(request_id: str, num_tokens: int, *, max_tokens: int = 16) -> Request:
    """A resumable request, whose first turn ends with STOP."""
    return request(request_id, num_tokens, max_tokens=max_tokens, stop_token_ids=[STOP], is_resumable=True)


def segment(*token_ids: int, max_tokens: int = 16) -> InputSegment:
    """Further input for a session; its turn ends with STOP alone."""
    return InputSegment(
        list(token_ids), SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({STOP}))
    )


class Stage:
    """A scheduler and what a test needs around it. One `step` is schedule and update."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        max_model_len: int = 2048,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 16,
        features: Sequence[SchedulerFeature] = (),
        budgets: Sequence[Budget] = (),
        policy: str = "fcfs",
        enable_common_prefix: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        reserve_full_prompt: bool = True,
        num_speculative_tokens: int = 0,
        step_costs: StepCosts | None = None,
        async_scheduling: bool = False,
        pipeline_stages: int = 1,
        prefill_share: float = 0.5,
        holds_idle: bool = False,
        groups: Sequence[AttentionKind] = (),
    ) -> None:
        config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_common_prefix=enable_common_prefix,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            reserve_full_prompt=reserve_full_prompt,
            num_speculative_tokens=num_speculative_tokens,
            drafts_at_launch=step_costs is not None,
            step_costs=step_costs,
            async_scheduling=async_scheduling,
            max_steps_in_flight=pipeline_stages + async_scheduling,
            pipeline_stages=pipeline_stages,
            prefill_share=prefill_share,
            holds_idle=holds_idle,
        )
        core = build_core(
            config,
            CacheConfig(
                num_blocks,
                tuple(groups) or (FullAttention(block_size),),
                enable_prefix_caching=enable_prefix_caching,
            ),
            policy=policy,
            features=features,
            budgets=budgets,
        )
        self.scheduler, self.cache, self.pool = core.scheduler, core.kv_cache, core.kv_cache.pool
        for feature in features:
            feature.wrap(self.scheduler, self.cache)
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for added in requests:
            self.scheduler.add(added)

    def schedule(self) -> StepPlan:
        self.now += 1.0
        return self.scheduler.schedule(self.now)

    def update(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]] | None = None,
        drafts: Mapping[str, Sequence[int]] | None = None,
        non_finite: Sequence[int] = (),
        barred: Sequence[int] = (),
    ) -> list[RequestOutput]:
        """Give back a step. Rows that sample and are not in `sampled` yield one token that ends nothing."""
        columns = zip(plan.request_ids, plan.samples, strict=True)
        chosen = sampled or {}
        tokens = [list(chosen.get(name, [NEW_TOKEN])) if samples else [] for name, samples in columns]
        result = StepResult(
            plan.step_number,
            tokens,
            {name: list(proposal) for name, proposal in (drafts or {}).items()},
            list(non_finite),
            list(barred),
        )
        return self.scheduler.update(plan, result, self.now)

    def step(self, sampled: Mapping[str, Sequence[int]] | None = None) -> StepPlan:
        plan = self.schedule()
        self.update(plan, sampled)
        return plan

    def preempt_running(self) -> None:
        """Preempt all that runs, as a lack of blocks does: its tokens in flight are still taken."""
        self.scheduler.restrict((), self.now)
        self.scheduler.restrict(None, self.now)

    def overlap(self, in_flight: list[StepPlan], *, depth: int = 2) -> list[RequestOutput]:
        """Plan a step, and give back the oldest once `depth` are in flight or there is nothing to plan."""
        plan = self.schedule()
        if plan.request_ids:
            in_flight.append(plan)
        if len(in_flight) == depth or (in_flight and not plan.request_ids):
            return self.update(in_flight.pop(0))
        return []

    def step_until_idle(self, max_steps: int = 1000) -> list[StepPlan]:
        """Step while there is work; more than `max_steps` are a failure."""
        plans: list[StepPlan] = []
        while self.scheduler.has_work:
            assert len(plans) < max_steps, "no end in sight"
            plans.append(self.step())
        return plans


def granted(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.request_ids, plan.num_tokens, strict=True))


def ids_of(requests: Iterable[Request]) -> list[str]:
    return [named.request_id for named in requests]
