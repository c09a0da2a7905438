"""Logprobs of a step as proto columns. NaN in rows that requested none."""

from __future__ import annotations

import sys
from array import array

from engine_svc.core.step import TokenLogprobs
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
        step.top_logprobs.CopyFrom(to_top(k, top_ids, top_logprobs))


def to_top(k: int, token_ids: array[int], logprobs: array[float]) -> step_pb2.StepTopLogprobs:
    return step_pb2.StepTopLogprobs(k=k, token_ids=pack(token_ids), logprobs=pack(logprobs))
