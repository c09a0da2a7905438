"""Log probabilities of the prompt: their limits, what an engine gets, and how they come to the client."""

from __future__ import annotations

from array import array

import pytest

from frontend_svc.engines.connection.columns import MalformedStep
from frontend_svc.generation.group import make_states
from frontend_svc.options.prompt_logprobs import PromptLogprobReader
from frontend_svc.output.collector import Ending, EndReason, OutputKind, ReaderLimit
from frontend_svc.output.logprobs import LogprobReader
from frontend_svc.output.processor import OutputProcessor, StepColumns
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.prompt import RequestPrompt
from tests.frontend_svc.fakes import make_request
from tests.frontend_svc.options.asking import breaches, completed, model_of, prepared
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import InvalidArgument


def test_their_limit_is_that_of_sampled_tokens():
    assert breaches(prompt_logprobs=20) == {}
    rule = "sampling.prompt_logprobs is 1099511627776, must be in 0..20"
    assert breaches(prompt_logprobs=2**40) == {"sampling.prompt_logprobs": rule}
    rule = "sampling.prompt_logprobs is -1, must be in 0..5"
    assert breaches(RequestLimits(max_logprobs=5), prompt_logprobs=-1) == {"sampling.prompt_logprobs": rule}
    assert breaches(RequestLimits(max_logprobs=-1), prompt_logprobs=600) == {}


async def test_they_are_sent_only_where_asked_for_and_none_is_not_nought():
    assert not (await completed()).HasField("prompt_logprobs")
    asked = await completed(prompt_logprobs=0)
    assert (asked.HasField("prompt_logprobs"), asked.prompt_logprobs) == (True, 0)


async def test_the_first_output_of_a_group_reports_them_and_all_compute_the_whole_prompt():
    entries = (await prepared(model_of(), n=3, temperature=0.5, prompt_logprobs=1)).entries
    assert [entry.sampling.HasField("prompt_logprobs") for entry in entries] == [True, False, False]
    assert [entry.sampling.skip_reading_prefix_cache for entry in entries] == [True] * 3


async def test_they_compute_the_whole_prompt_unless_the_client_says_otherwise():
    assert (await completed(prompt_logprobs=1)).skip_reading_prefix_cache
    asked = await completed(prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert not asked.skip_reading_prefix_cache


async def test_those_of_a_long_prompt_have_a_limit_of_entries():
    model = model_of(max_model_len=100_000)
    await prepared(model, 9_500, prompt_logprobs=20, logprob_token_ids=[])
    await prepared(model, 50_000, prompt_logprobs=0)
    with pytest.raises(InvalidArgument, match="210000 entries for 10000 prompt tokens, must have at most"):
        await prepared(model, 10_000, prompt_logprobs=20, logprob_token_ids=[1])
    with pytest.raises(InvalidArgument, match="600000 entries for 1000 prompt tokens"):
        await prepared(model, 1000, prompt_logprobs=-1)
    await prepared(model, 10_000, logprobs=20, logprob_token_ids=[1])


def extra(first_position: int, *logprobs: float) -> step_pb2.StepExtra:
    ranks = array("I", range(first_position, first_position + len(logprobs)))
    part = step_pb2.PromptLogprobs(
        first_position=first_position, logprobs=array("f", logprobs).tobytes(), ranks=ranks.tobytes()
    )
    return step_pb2.StepExtra(prompt_logprobs=part)


def test_positions_are_reported_once_whatever_engines_report_them():
    reader = PromptLogprobReader([10, 11, 12, 13], LogprobReader(None, has_top=False))
    reader.read(extra(0, 0.0, -1.0))
    # Another engine begins anew, and cuts the prompt elsewhere.
    reader.read(extra(0, 0.0))
    reader.read(extra(1, -1.0, -2.0))
    reader.read(extra(3, -3.0))
    started = generate_pb2.Started()
    reader.fill(started, [])
    received = started.prompt_logprobs
    assert (list(received.token_ids), list(received.logprobs)) == ([10, 11, 12, 13], [0.0, -1.0, -2.0, -3.0])
    again = generate_pb2.Started()
    reader.fill(again, [])
    assert not again.HasField("prompt_logprobs")


def test_columns_of_different_lengths_are_malformed():
    broken = extra(0, 0.0, -1.0)
    broken.prompt_logprobs.ranks = b"\1\0\0\0"
    with pytest.raises(MalformedStep):
        PromptLogprobReader([5, 6], LogprobReader(None, has_top=False)).read(broken)


async def test_all_parts_come_before_the_first_output_which_waits_for_them():
    request = make_request([7, 8, 9], n=2, prompt_logprobs=0, detokenize=False)
    states = make_states(
        request,
        RequestPrompt(request),
        await prepared(model_of(), 3, n=2, prompt_logprobs=0, detokenize=False),
        OutputKind.DELTA,
        stream_interval=1,
        limit=ReaderLimit(),
        on_slow=lambda: None,
    )
    processor = OutputProcessor(on_end=lambda handle: None)
    for handle, state in enumerate(states):
        processor.register(handle, state)
    processor.process(StepColumns([0, 1], [0, 1], [5], {}, {}, extras={0: [extra(0, 0.0)]}))
    assert states[0].has_begun
    processor.process(
        StepColumns([0], [1], [5], {0: Ending(EndReason.LENGTH)}, {}, extras={0: [extra(1, -1.0, -2.0)]})
    )
    output = await states[0].collector.get()
    assert [piece.index for piece in output.pieces] == [0, 1]
    started = generate_pb2.Started()
    states[0].fill(started)
    assert list(started.prompt_logprobs.logprobs) == [0.0, -1.0, -2.0]
