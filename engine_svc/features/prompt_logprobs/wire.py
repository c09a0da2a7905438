"""Reads `prompt_logprobs` of an ADD, and writes the logprobs into the rows of a step."""

from __future__ import annotations

from array import array

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.convert.logprobs import pack, to_top
from engine_svc.core.step import TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.field_checks import check
from triptych_kit.rules import rules_of

# Of a whole prompt: all of them are held in memory and sent before the first token.
_MAX_ENTRIES = rules_of(sampling_pb2.SamplingParams, "prompt_logprobs").max_results
_NAN = float("nan")


def make(config: EngineConfig) -> WireFeature:
    return PromptLogprobsOfAdd()


class PromptLogprobsOfAdd(WireFeature):
    fields = ("sampling.prompt_logprobs",)
    writes = PromptLogprobs

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling, facts = entry.sampling, context.facts
        if not sampling.HasField("prompt_logprobs"):
            return None
        num_top = sampling.prompt_logprobs
        num_each = facts.vocab_size if num_top == -1 else num_top
        num_entries = len(context.token_ids) * (num_each + len(sampling.logprob_token_ids))
        check(
            num_entries <= _MAX_ENTRIES,
            "prompt_logprobs",
            num_entries,
            f"at most {_MAX_ENTRIES} entries for the whole prompt",
        )
        if context.spans:
            raise InvalidArgument(
                "sampling.prompt_logprobs: a position without a token has no log probability",
                field="sampling.prompt_logprobs",
            )
        # There are no logprobs of positions that are not computed.
        return Parsed(
            PromptLogprobSpec(num_top, tuple(sampling.logprob_token_ids)), skips_reading_prefix_cache=True
        )

    def write(self, step: step_pb2.Step, row: int, extra: PromptLogprobs, now: float) -> None:
        for run in extra.runs:
            step.extras.add(row=row, prompt_logprobs=_to_proto(run))


def _to_proto(run: PromptRun) -> step_pb2.PromptLogprobs:
    """Logprobs of prompt positions. Adds position 0, which has none."""
    columns, first = run.token_logprobs, run.first_position
    if first == 1:
        nothing = TokenLogprobs([_NAN], [0], columns.k, [0] * columns.k, [_NAN] * columns.k)
        nothing.extend(columns)
        columns, first = nothing, 0
    message = step_pb2.PromptLogprobs(
        first_position=first,
        logprobs=pack(array("f", columns.logprobs)),
        ranks=pack(array("I", columns.ranks)),
    )
    if columns.k:
        message.top.CopyFrom(
            to_top(columns.k, array("I", columns.top_token_ids), array("f", columns.top_logprobs))
        )
    return message
