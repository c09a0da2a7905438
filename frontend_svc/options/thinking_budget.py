"""Thinking budget: the reasoning of the model ends after so many tokens."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption, check_set
from frontend_svc.parsers.registry import reasoning_parser
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from service_kit.errors import Unimplemented
from triptych.engine.v1 import add_pb2


class ThinkingBudget(RequestOption):
    fields = ("sampling.thinking_token_budget",)

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        is_fine = request.sampling.thinking_token_budget >= -1
        rule = "must be -1 (no budget), 0 or more"
        check_set(request.sampling, "thinking_token_budget", is_fine, rule, violations)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        sampling, model = request.sampling, prompt.model
        # Some clients send -1 for no limit.
        if not sampling.HasField("thinking_token_budget") or sampling.thinking_token_budget == -1:
            return
        reasoning = reasoning_parser(model.parsers.reasoning)
        if reasoning is None:
            raise Unimplemented(
                f"sampling.thinking_token_budget: no reasoning parser is known for model {model.name!r}",
                reason="PARAMETER_NOT_SERVED",
                metadata={"fields": "sampling.thinking_token_budget"},
            )
        opening, closing = reasoning.block
        entry.sampling.thinking_token_budget = sampling.thinking_token_budget
        encode, markers = model.tokenizer.encode, entry.reasoning_options
        markers.start_token_ids.extend(await encode(opening, add_special_tokens=False))
        markers.end_token_ids.extend(await encode(closing, add_special_tokens=False))
