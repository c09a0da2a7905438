"""Ends outputs where their grammar has ended, and counts the costs of grammars."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extras
from engine_svc.core.request import FinishReason, Request, RequestOutput, Verdict
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.structured_output.constraint import ConstraintKind
from engine_svc.features.structured_output.extras import GrammarTimes, StructuredOutput
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from triptych_kit.telemetry.metrics import Metrics

_COMPILE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_MASK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
# Before the request ran; where its other rules leave no token; else while it ran.
_CAUSES = ("prepare", "conflict", "run")


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    return GrammarEnds(context.metrics) if config.enable_structured_output else None


class GrammarEnds(SchedulerFeature):
    """Reads nothing of a request's grammar but its extra."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counts(
            "triptych_engine_structured_output_requests_total",
            "Requests with a constraint, by its kind.",
            labels=("kind",),
            zeros=[(kind.value,) for kind in ConstraintKind],
        )
        self._failures = metrics.counts(
            "triptych_engine_structured_output_failures_total",
            "Constrained requests that ended with an error: prepare, before they ran; conflict, no token "
            "left; run, else.",
            labels=("cause",),
            zeros=[(cause,) for cause in _CAUSES],
        )
        self._cache_hits = metrics.counts(
            "triptych_engine_grammar_cache_hits_total", "Requests whose grammar had been compiled before."
        )
        self._compile_s = metrics.histogram(
            "triptych_engine_grammar_compile_seconds",
            "Time to compile a grammar that was not cached; the request waits, others do not.",
            _COMPILE_BUCKETS,
        ).of()
        self._mask_s = metrics.histogram(
            "triptych_engine_grammar_mask_seconds",
            "Time to make the masks of a step's rows with constraints, on a CPU while its forward runs.",
            _MASK_BUCKETS,
        ).of()
        self._failed_ids: set[str] = set()  # in the update that runs

    def on_add(self, request: Request) -> None:
        spec: StructuredOutput | None = request.extras.get(StructuredOutput)
        if spec is not None:
            self._requests.add(spec.constraint.kind.value)
            # Otherwise the core itself ends it.
            request.needs_verdict |= request.sampling.ignore_eos

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        """Nothing may follow an end token that the grammar allowed."""
        spec: StructuredOutput | None = request.extras.get(StructuredOutput)
        if spec is None or not request.sampling.ignore_eos:
            return None
        new = output.new_token_ids
        ends = [index for index, token in enumerate(new) if token in spec.eos_token_ids]
        if not ends:
            return None
        begin = spec.begin_in(request.output_token_ids)
        for index in ends:
            if 0 <= begin <= request.num_output_tokens - len(new) + index:
                return Verdict(FinishReason.STOP, num_tokens=index + 1)
        return None

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        for times in result.extras.pop(GrammarTimes, {}).values():
            if times.masks_us >= 0:
                self._mask_s.observe(times.masks_us / 1e6)
            if times.compile_us == 0:
                self._cache_hits.add()
            elif times.compile_us > 0:
                self._compile_s.observe(times.compile_us / 1e6)
        if self._failed_ids:
            barred = {plan.request_ids[row] for row in result.barred}
            for request_id in self._failed_ids:
                self._failures.add("conflict" if request_id in barred else "run")
            self._failed_ids.clear()

    def on_finish(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ERROR and StructuredOutput in request.extras:
            if request.timeline.scheduled_at is None:
                self._failures.add("prepare")
            else:
                self._failed_ids.add(request.request_id)
