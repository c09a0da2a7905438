"""What a Generate call comes to, as plain data."""

from __future__ import annotations

from array import array

from tests.frontend_svc.fakes import AT_LENGTH, TOKENIZER, FakeEngine, FakeRequest, make_request, serving
from triptych.engine.v1 import step_pb2
from triptych_cli.verbs.generation import Generation, event_record
from triptych_kit.channel import open_channel

TOKEN_ID = TOKENIZER.encode("cat").ids[0]


def one_token(engine: FakeEngine, request: FakeRequest) -> None:
    """Answer with one token of log probability -0.5, second in rank."""
    request.session.send(
        step=step_pb2.Step(
            step_number=1,
            handles=array("I", [request.handle]).tobytes(),
            num_tokens=bytes([1]),
            token_ids=array("I", [TOKEN_ID]).tobytes(),
            sampled_logprobs=array("f", [-0.5]).tobytes(),
            sampled_ranks=array("I", [2]).tobytes(),
            finished=[AT_LENGTH],
        )
    )


def drafted(engine: FakeEngine, request: FakeRequest) -> None:
    end = step_pb2.StepFinished()
    end.CopyFrom(AT_LENGTH)
    end.drafts.num_proposed, end.drafts.num_accepted = 4, 3
    engine.step({request: [TOKEN_ID]}, finished={request: end})


async def test_drafts_are_summed_over_the_outputs_and_left_out_where_there_were_none() -> None:
    usages = []
    for script in (drafted, one_token):
        async with serving(FakeEngine(script)) as (_, frontend), open_channel(frontend.address) as channel:
            generation = Generation(channel, make_request("a", n=2, max_draft_tokens=4))
            async for _ in generation.events(10.0):
                pass
        usages.append(generation.answer.usage)
    with_drafts, without = usages
    assert (with_drafts["num_draft_tokens"], with_drafts["num_accepted_draft_tokens"]) == (8, 6)
    assert with_drafts["num_prompt_tokens"] == without["num_prompt_tokens"] == 1
    assert without.keys() == {"num_prompt_tokens", "num_cached_tokens", "num_completion_tokens"}


async def test_an_answer_has_the_log_probabilities_that_were_asked_for() -> None:
    async with serving(FakeEngine(one_token)) as (_, frontend), open_channel(frontend.address) as channel:
        generation = Generation(channel, make_request("a", logprobs=0, n=2))
        responses = [response async for response in generation.events(10.0)]
    answer = generation.answer
    token = {
        "token_id": TOKEN_ID,
        "logprob": -0.5,
        "rank": 2,
        "text": TOKENIZER.decode([TOKEN_ID]),
        "top": (),
    }
    first = answer.first
    assert (first.logprobs, first.cumulative_logprob, first.finish_reason) == ([token], -0.5, "length")
    assert answer.usage["num_completion_tokens"] == 2
    records = [event_record(response, answer.trace_id) for response in responses]
    assert [record["logprobs"] for record in records if record["event"] == "delta"] == [[token], [token]]
    ends = [record for record in records if record["event"] == "finished"]
    assert [end["cumulative_logprob"] for end in ends] == [-0.5, -0.5]
