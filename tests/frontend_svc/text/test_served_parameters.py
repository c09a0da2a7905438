"""Parameters through a whole frontend: what the client gets, and what the engine is sent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from tests.frontend_svc.fakes import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    TOKENIZER,
    FakeEngine,
    FakeRequest,
    Script,
    answer,
    read_all,
    serving,
    serving_one,
)
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2

TEXT = " is Lee, and I'm a student at the organization."
IDS = TOKENIZER.encode(TEXT).ids


def ended_by(record: step_pb2.StepFinished, token_ids: Sequence[int]) -> Script:
    """A script that answers with these tokens, one a step, of which the last ends the output."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        for token_id in token_ids[:-1]:
            engine.step({request: [token_id]})
        engine.step({request: [token_ids[-1]]}, finished={request: record})

    return script


@pytest.mark.parametrize(
    ("stop", "include", "end"),
    [
        ("gani", False, " at the or"),
        ("gani", True, " at the organi"),
        # Of several tokens, from the middle of the first to the middle of the last.
        ("udent at the org", False, "I'm a st"),
        ("udent at the org", True, "I'm a student at the org"),
    ],
)
async def test_81_a_stop_string_ends_the_text_within_a_token(stop, include, end):
    async with serving(FakeEngine(answer(TEXT))) as (client, _):
        call = client.generate("My name", stop=[stop], include_stop_in_output=include)
        _, text, ids, finished = await read_all(call)
    assert TEXT.startswith(text) and text.endswith(end)
    assert finished.reason == output_pb2.FINISH_REASON_STOP
    assert finished.stop_match == output_pb2.StopMatch(string=stop)
    # The token that completes it is there whole.
    assert TOKENIZER.decode(ids).endswith(" organization")


async def test_83_each_way_to_end_has_its_reason_and_its_match():
    stop_id = IDS[3]
    by_id = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP, stop_token_id=stop_id)
    cases = [
        (ended_by(by_id, IDS[:4]), {"stop_token_ids": [stop_id]}, "stop", ("token_id", stop_id)),
        (answer(TEXT), {"stop": ["Lee"]}, "stop", ("string", "Lee")),
        (answer(TEXT), {}, "stop", ("eos", EOS_ID)),
        (ended_by(AT_LENGTH, [*IDS, EOS_ID, *IDS]), {"ignore_eos": True}, "length", (None, None)),
    ]
    for script, fields, reason, (match, value) in cases:
        engine = FakeEngine(script)
        async with serving(engine) as (client, _):
            _, _, _, finished = await read_all(client.generate("My name", **fields))
        assert output_pb2.FinishReason.Name(finished.reason) == f"FINISH_REASON_{reason.upper()}"
        assert finished.stop_match.WhichOneof("match") == match
        assert match is None or getattr(finished.stop_match, match) == value
        sent = engine.requests[0].entry.sampling
        assert sent.ignore_eos == fields.get("ignore_eos", False)
        assert list(sent.stop_token_ids) == fields.get("stop_token_ids", [])


def with_logprobs(token_ids: Sequence[int], record: step_pb2.StepFinished) -> Script:
    """A script with each token's log probability, minus its index, in one step each."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        for index, token_id in enumerate(token_ids):
            step = step_pb2.Step(
                step_number=index + 1,
                handles=array("I", [request.handle]).tobytes(),
                num_tokens=bytes([1]),
                token_ids=array("I", [token_id]).tobytes(),
                sampled_logprobs=array("f", [-float(index)]).tobytes(),
                sampled_ranks=array("I", [index + 1]).tobytes(),
            )
            if index == len(token_ids) - 1:
                step.finished.add().CopyFrom(record)
            request.session.send(step=step)

    return script


@pytest.mark.parametrize("include", [False, True])
async def test_84_a_stop_token_is_shown_only_on_demand_but_is_in_ids_and_logprobs(include):
    stop_id = IDS[3]
    record = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP, stop_token_id=stop_id)
    engine = FakeEngine(with_logprobs(IDS[:4], record))
    texts, ids, logprobs, token_texts = "", [], [], []
    async with serving(engine) as (client, _):
        call = client.generate(
            "My name", stop_token_ids=[stop_id], include_stop_in_output=include, logprobs=0
        )
        async for response in call:
            texts += response.delta.text
            ids += response.delta.token_ids
            logprobs += response.delta.logprobs.logprobs
            token_texts += response.delta.logprobs.texts
    assert texts == TOKENIZER.decode(IDS[: 4 if include else 3])
    assert ids == IDS[:4]
    assert logprobs == [0.0, -1.0, -2.0, -3.0]
    assert "".join(token_texts) == TOKENIZER.decode(IDS[:4])
    assert engine.requests[0].abort_reason is None


@pytest.mark.parametrize(("asked", "effective"), [(1, 5), (10, 10)])
async def test_85_a_delta_has_at_least_the_services_interval_and_the_text_is_the_same(asked, effective):
    async with serving_one(stream_interval=5) as (engine, client, _):
        call = client.generate("My name", stream_interval=asked)
        await engine.wait_for_requests(1)
        beside = client.generate("My name")
        mine, other = await engine.wait_for_requests(2)

        async def tokens_of_next_delta() -> list[int]:
            while not (response := await call.read()).HasField("delta"):
                pass
            return list(response.delta.token_ids)

        engine.step({mine: IDS[:1]})
        assert await tokens_of_next_delta() == IDS[:1]
        engine.step({mine: IDS[1:effective]})
        # What comes behind it on the same stream is with its client: these tokens are held back.
        engine.step({other: [EOS_ID]}, finished={other: AT_EOS})
        await read_all(beside)
        engine.step({mine: IDS[effective : effective + 1]})
        assert await tokens_of_next_delta() == IDS[1 : effective + 1]
        engine.step({mine: IDS[effective + 1 :]}, finished={mine: AT_LENGTH})
        assert await tokens_of_next_delta() == IDS[effective + 1 :]
        finished = (await call.read()).finished
    assert finished.usage.num_completion_tokens == len(IDS)


async def test_bad_words_reach_the_engine_as_token_sequences():
    engine = FakeEngine(answer("a"))
    async with serving(engine) as (client, _):
        await read_all(client.generate("My name", bad_words=["cat"]))
    entry = engine.requests[0].entry
    sequences = [array("I", sequence.token_ids).tolist() for sequence in entry.bad_words]
    assert [TOKENIZER.decode(ids) for ids in sequences] == ["cat", " cat"]
    assert not entry.sampling.bad_words


async def test_96_an_end_of_sequence_that_is_not_the_main_one_ends_as_one():
    second = IDS[5]
    record = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP, eos_token_id=second)
    engine = FakeEngine(ended_by(record, [*IDS[:3], second]))
    async with serving(engine) as (client, _):
        _, text, ids, finished = await read_all(client.generate("My name"))
    assert finished.stop_match == output_pb2.StopMatch(eos=second)
    assert text == TOKENIZER.decode(IDS[:3])
    assert ids[-1] == second


async def test_97_two_requests_of_different_calls_have_internal_ids_of_their_own():
    engine = FakeEngine(answer("a"))
    async with serving(engine) as (client, _):
        for _ in range(2):
            started, *_ = await read_all(client.generate("My name", request_id="x"))
            assert started.request_id == "x"
    first, second = (request.entry for request in engine.requests)
    assert first.external_request_id == second.external_request_id == "x"
    assert first.request_id != second.request_id
    assert all(len(entry.request_id) == 32 for entry in (first, second))
