"""Reads the thinking budget of an ADD, and the markers around reasoning."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import check


def make(config: EngineConfig) -> WireFeature:
    return ThinkingBudgetOfAdd()


class ThinkingBudgetOfAdd(WireFeature):
    fields = ("sampling.thinking_token_budget",)

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        if not entry.sampling.HasField("thinking_token_budget"):
            return None
        budget, markers = entry.sampling.thinking_token_budget, entry.reasoning_options
        if budget == -1:
            return None
        for name, ids in (
            ("reasoning_options.start_token_ids", markers.start_token_ids),
            ("reasoning_options.end_token_ids", markers.end_token_ids),
        ):
            check(len(ids) >= 1, name, len(ids), "at least 1 id with a thinking_token_budget")
        return Parsed(ThinkingBudget(budget, tuple(markers.start_token_ids), tuple(markers.end_token_ids)))
