"""Thinking budget: the number of tokens after which the reasoning of the model ends."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption, add_reasoning_markers
from triptych.engine.v1 import add_pb2


class ThinkingBudget(RequestOption):
    fields = ("sampling.thinking_token_budget",)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        sampling, model = request.sampling, prompt.model
        # Some clients send -1 for no limit.
        if not sampling.HasField("thinking_token_budget") or sampling.thinking_token_budget == -1:
            return
        await add_reasoning_markers("sampling.thinking_token_budget", model, entry)
        entry.sampling.thinking_token_budget = sampling.thinking_token_budget
