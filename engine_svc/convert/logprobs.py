"""What a step tells of tokens besides their ids, as columns of the wire. NaN stands where nobody asked."""

from __future__ import annotations

import sys
from array import array

from engine_svc.core.step import PromptPlaces, TokenLogprobs
from engine_svc.loop.step_output import StepOutput, Told
from triptych.engine.v1 import step_pb2


def pack(values: array[int] | array[float]) -> bytes:
    """The bytes of a column; `values` is not to be used any more."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


_NAN = float("nan")


def add_logprobs(step: step_pb2.Step, output: StepOutput, told: Told) -> None:
    """Write into `step` what `told` has for the rows of `output`."""
    if told.sampled:
        _add_sampled(step, output, told.sampled)
    row_of = {handle: row for row, handle in enumerate(output.handles)}
    for handle, places in told.prompts.items():
        for part in places:
            step.extras.add(row=row_of[handle], prompt_logprobs=_prompt(part))


def _add_sampled(step: step_pb2.Step, output: StepOutput, told: dict[int, TokenLogprobs]) -> None:
    logprobs, ranks = array("f"), array("I")
    k = max(part.k for part in told.values())
    top_ids, top_logprobs = array("I"), array("f")
    for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
        part = told.get(handle)
        if part is None:
            part = TokenLogprobs([_NAN] * num_tokens, [0] * num_tokens)
        assert len(part.ranks) == num_tokens, "who asked is told of each of its tokens"
        logprobs.extend(part.logprobs)
        ranks.extend(part.ranks)
        part = part.widened(k)
        top_ids.extend(part.top_token_ids)
        top_logprobs.extend(part.top_logprobs)
    step.sampled_logprobs, step.sampled_ranks = pack(logprobs), pack(ranks)
    if k:
        step.top_logprobs.CopyFrom(_top(k, top_ids, top_logprobs))


def _prompt(places: PromptPlaces) -> step_pb2.PromptLogprobs:
    """The places; the first of all prompts is added, of which nothing can be told."""
    told, first = places.told, places.first_position
    if first == 1:
        nothing = TokenLogprobs([_NAN], [0], told.k, [0] * told.k, [_NAN] * told.k)
        nothing.extend(told)
        told, first = nothing, 0
    message = step_pb2.PromptLogprobs(
        first_position=first, logprobs=pack(array("f", told.logprobs)), ranks=pack(array("I", told.ranks))
    )
    if told.k:
        message.top.CopyFrom(_top(told.k, array("I", told.top_token_ids), array("f", told.top_logprobs)))
    return message


def _top(k: int, token_ids: array[int], logprobs: array[float]) -> step_pb2.StepTopLogprobs:
    return step_pb2.StepTopLogprobs(k=k, token_ids=pack(token_ids), logprobs=pack(logprobs))
