"""Logprobs of a step as proto columns. NaN in rows that requested none."""

from __future__ import annotations

import sys
from array import array

from engine_svc.core.step import PromptTokenLogprobs, TokenLogprobs
from engine_svc.loop.step_output import LogprobDeltas, StepOutput
from triptych.engine.v1 import step_pb2

_NAN = float("nan")


def pack(values: array[int] | array[float]) -> bytes:
    """Little-endian bytes of a column. May modify `values`: do not use it afterwards."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def add_logprobs(step: step_pb2.Step, output: StepOutput, token_logprobs: LogprobDeltas) -> None:
    """Write the logprobs of the rows of `output` into `step`."""
    if token_logprobs.sampled:
        _add_sampled(step, output, token_logprobs.sampled)
    row_of = {handle: row for row, handle in enumerate(output.handles)}
    for handle, prompt in token_logprobs.prompts.items():
        for part in prompt:
            step.extras.add(row=row_of[handle], prompt_logprobs=_prompt(part))


def _add_sampled(step: step_pb2.Step, output: StepOutput, token_logprobs: dict[int, TokenLogprobs]) -> None:
    logprobs, ranks = array("f"), array("I")
    k = max(part.k for part in token_logprobs.values())
    top_ids, top_logprobs = array("I"), array("f")
    for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
        part = token_logprobs.get(handle)
        if part is None:
            part = TokenLogprobs([_NAN] * num_tokens, [0] * num_tokens)
        assert len(part.ranks) == num_tokens, "a requesting row has logprobs for each of its tokens"
        logprobs.extend(part.logprobs)
        ranks.extend(part.ranks)
        part = part.widened(k)
        top_ids.extend(part.top_token_ids)
        top_logprobs.extend(part.top_logprobs)
    step.sampled_logprobs, step.sampled_ranks = pack(logprobs), pack(ranks)
    if k:
        step.top_logprobs.CopyFrom(_top(k, top_ids, top_logprobs))


def _prompt(prompt: PromptTokenLogprobs) -> step_pb2.PromptLogprobs:
    """Logprobs of prompt positions. Adds position 0, which has none."""
    token_logprobs, first = prompt.token_logprobs, prompt.first_position
    if first == 1:
        nothing = TokenLogprobs(
            [_NAN], [0], token_logprobs.k, [0] * token_logprobs.k, [_NAN] * token_logprobs.k
        )
        nothing.extend(token_logprobs)
        token_logprobs, first = nothing, 0
    message = step_pb2.PromptLogprobs(
        first_position=first,
        logprobs=pack(array("f", token_logprobs.logprobs)),
        ranks=pack(array("I", token_logprobs.ranks)),
    )
    if token_logprobs.k:
        message.top.CopyFrom(
            _top(
                token_logprobs.k,
                array("I", token_logprobs.top_token_ids),
                array("f", token_logprobs.top_logprobs),
            )
        )
    return message


def _top(k: int, token_ids: array[int], logprobs: array[float]) -> step_pb2.StepTopLogprobs:
    return step_pb2.StepTopLogprobs(k=k, token_ids=pack(token_ids), logprobs=pack(logprobs))
