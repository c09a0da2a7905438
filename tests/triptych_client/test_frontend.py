"""Both clients against a real frontend before a fake engine: every call there is."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Sequence

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_LENGTH,
    EOS_ID,
    MAX_MODEL_LEN,
    TOKENIZER,
    FakeEngine,
    FakeRequest,
    answer,
    serving,
)
from triptych.common.v1 import output_pb2, tensor_pb2
from triptych.engine.v1 import step_pb2
from triptych_client.aio import Client
from triptych_client.chat_events import ChatDelta, ChatEvent, ToolCallPiece
from triptych_client.chat_request import ChatMessage, Tool
from triptych_client.client import Client as BlockingClient
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished, ItemEvent, Started
from triptych_client.logprobs import TokenLogprob, TopToken
from triptych_client.retry import RetryPolicy

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = "the cat sat"
ADD: Tool = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
USER: ChatMessage = {"role": "user", "content": "the cat"}
POOLING = ("embed", "classify")


def with_logprobs(engine: FakeEngine, request: FakeRequest) -> None:
    """Answer with two tokens of log probabilities -0.5 and -1, each beside the one most likely."""
    request.session.send(
        step=step_pb2.Step(
            step_number=1,
            handles=array("I", [request.handle]).tobytes(),
            num_tokens=bytes([2]),
            token_ids=array("I", TOKENIZER.encode("the cat").ids[:2]).tobytes(),
            sampled_logprobs=array("f", [-0.5, -1.0]).tobytes(),
            sampled_ranks=array("I", [2, 1]).tobytes(),
            top_logprobs=step_pb2.StepTopLogprobs(
                k=1,
                token_ids=array("I", [EOS_ID, 7]).tobytes(),
                logprobs=array("f", [-0.25, -1.0]).tobytes(),
            ),
            finished=[AT_LENGTH],
        )
    )


def pooled(engine: FakeEngine, request: FakeRequest) -> None:
    """Pool every prompt to its length and 1, in bfloat16."""
    content = b"".join(array("f", [value]).tobytes()[2:] for value in (float(len(request.prompt)), 1.0))
    engine.pool(request, tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_BF16, shape=[2], inline=content))


def joined(events: Sequence[ChatEvent]) -> tuple[str, str, str]:
    """All content, reasoning and arguments of calls."""
    deltas = [event for event in events if isinstance(event, ChatDelta)]
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        "".join(call.arguments_json for delta in deltas for call in delta.tool_calls),
    )


async def test_several_outputs_come_with_their_logprobs_texts_ranks_and_sums() -> None:
    async with serving(FakeEngine(with_logprobs)) as (_, frontend), Client(frontend.address) as client:
        completion = await client.generate_unary("a", n=2, logprobs=1, return_prompt_token_ids=True)
        events = [event async for event in client.generate("a", n=2, logprobs=1)]
    first_id, second_id = TOKENIZER.encode("the cat").ids[:2]
    first_text = TOKENIZER.decode([first_id])
    second_text = TOKENIZER.decode([first_id, second_id]).removeprefix(first_text)
    expected = (
        TokenLogprob(first_id, -0.5, 2, first_text, (TopToken(EOS_ID, -0.25, "<|end|>"),)),
        TokenLogprob(second_id, -1.0, 1, second_text, (TopToken(7, -1.0, TOKENIZER.decode([7])),)),
    )
    assert [output.output_index for output in completion.outputs] == [0, 1]
    for output in completion.outputs:
        shown = output.logprobs
        assert shown == expected
        assert (output.cumulative_logprob, output.reason) == (-1.5, "length")
    assert completion.started.prompt_token_ids == tuple(TOKENIZER.encode("a").ids)
    assert completion.usage.num_completion_tokens == 4
    by_stream = [event.logprobs for event in events if isinstance(event, Delta)]
    assert by_stream == [output.logprobs for output in completion.outputs]
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.cumulative_logprob for end in ends] == [-1.5, -1.5]


async def test_a_conversation_streams_reasoning_content_and_calls_and_goes_on() -> None:
    engine = FakeEngine(answer(f"hm\n</think>\n\nI add. {CALL}"), chat_template=TEMPLATE)
    async with serving(engine) as (_, frontend), Client(frontend.address) as client:
        stream = client.chat([USER], tools=[ADD], enable_thinking=True, max_tokens=400)
        events = [event async for event in stream]
        whole = await client.chat_unary([USER], tools=[ADD], enable_thinking=True)
        following: list[ChatMessage] = [USER, whole.outputs[0].as_message()]
        prompt = await client.apply_chat_template(following, enable_thinking=False)
        texts = [text async for text in client.chat([USER], tools=[ADD]).text_deltas()]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    content, reasoning, arguments = joined(events)
    assert (content.strip(), reasoning, json.loads(arguments)) == ("I add.", "hm", {"a": 1})
    (output,) = whole.outputs
    (call,) = output.tool_calls
    assert isinstance(call, ToolCallPiece)
    assert (whole.text.strip(), output.reasoning, call.name) == ("I add.", "hm", "add")
    assert json.loads(call.arguments_json) == {"a": 1}
    assert following[1]["tool_calls"][0]["name"] == "add"
    assert prompt.text.startswith("[user] the cat\n[assistant] I add.")
    assert list(prompt.token_ids) == TOKENIZER.encode(prompt.text).ids
    assert texts


async def test_a_batch_goes_on_past_an_item_that_is_refused() -> None:
    async with serving(FakeEngine(answer(TEXT))) as (_, frontend), Client(frontend.address) as client:
        stream = client.generate_batch(["a", "b", [5]], [{}, {"temperature": 9.0}, {}], max_tokens=50)
        items: list[ItemEvent] = [item async for item in stream]
    errors = [item for item in items if isinstance(item.event, TriptychError)]
    ends = sorted(item.item_index for item in items if isinstance(item.event, Finished))
    assert [item.item_index for item in errors] == [1]
    assert isinstance(errors[0].event, TriptychError)
    assert errors[0].event.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in errors[0].event.field_violations[0].field
    assert ends == [0, 2]


async def test_texts_become_tokens_and_offsets_and_a_tokenizer_can_be_downloaded() -> None:
    async with serving(FakeEngine()) as (_, frontend), Client(frontend.address) as client:
        ids = await client.tokenize(TEXT)
        tokens = await client.tokenize_with_offsets(TEXT)
        text = await client.detokenize(ids)
        files = await client.get_tokenizer()
    assert ids == TOKENIZER.encode(TEXT).ids == [token.token_id for token in tokens]
    assert "".join(TEXT[token.start : token.end] for token in tokens) == text == TEXT
    assert json.loads(files["tokenizer.json"]) == json.loads(TOKENIZER.to_str())


async def test_vectors_scores_orders_and_classes() -> None:
    engine = FakeEngine(pooled, supported_tasks=POOLING)
    async with serving(engine, waits_ready=False) as (served, frontend), Client(frontend.address) as client:
        await served.until_engines_are_ready(1)
        embeddings = await client.embed([[1, 2], [3]], request_id="mine")
        scores = await client.score([[1, 2]], [[3], [4, 5]])
        ranking = await client.rerank([1, 2], [[3], [4, 5]], top_n=1)
        classes = await client.classify([[1, 2]], use_activation=False)
    assert [tensor.vector for tensor in embeddings.embeddings] == [(2.0, 1.0), (1.0, 1.0)]
    assert (embeddings.request_id, embeddings.usage.num_prompt_tokens) == ("mine", 3)
    assert len(scores.scores) == 2
    assert [document.document_index for document in ranking.documents] == [1]
    assert ranking.documents[0].score == scores.scores[1]
    assert classes.results[0].vectors == ((2.0, 1.0),)
    assert engine.requests[-1].entry.pooling.HasField("use_activation")


async def test_a_request_can_be_looked_at_and_aborted_by_its_id() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, frontend), Client(frontend.address) as client:
        stream = client.generate("the cat", request_id="mine")
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        await anext(stream)
        status = await client.get_request("mine")
        state = await client.abort("mine")
        rest = [event async for event in stream]
        with pytest.raises(TriptychError) as caught:
            await client.get_request("no such")
    assert (status.state, status.usage.num_completion_tokens, status.num_attempts) == ("running", 1, 1)
    assert state == "running"
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason == "abort"
    assert caught.value.status is grpc.StatusCode.NOT_FOUND


async def test_models_and_server_and_readiness() -> None:
    async with serving(FakeEngine()) as (_, frontend), Client(frontend.address) as client:
        assert [model.name for model in await client.list_models()] == ["tiny"]
        assert (await client.get_model(model="tiny")).max_model_len == MAX_MODEL_LEN
        assert len((await client.server_info()).engines) == 1
        assert await client.is_ready()


async def test_a_refusal_names_the_call_and_its_trace() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with serving(FakeEngine()) as (_, frontend), Client(frontend.address) as client:
        with pytest.raises(TriptychError) as by_unary:
            await client.generate_unary("a", temperature=9.0, metadata=headers)
        with pytest.raises(TriptychError) as by_stream:
            await anext(client.generate("a", temperature=9.0, metadata=headers))
    for caught in (by_unary, by_stream):
        assert (caught.value.request_id, caught.value.trace_id) == ("mine", trace_id)
        assert [violation.field for violation in caught.value.field_violations] == ["sampling.temperature"]
        assert caught.value.reason


async def test_a_full_frontend_is_asked_again_when_it_said_and_no_sooner() -> None:
    engine = FakeEngine()
    patient = RetryPolicy(max_attempts=100, first_backoff_s=0.01, max_backoff_s=0.01)
    async with (
        serving(engine, max_queued_requests=1) as (_, frontend),
        Client(frontend.address, retry=patient) as client,
    ):
        first = client.generate("a")
        (held,) = await engine.wait_for_requests(1)
        second = asyncio.create_task(anext(client.generate("b")))
        never = Client(frontend.address, retry=RetryPolicy(max_attempts=1))
        with pytest.raises(TriptychError) as caught:
            await anext(never.generate("c"))
        await never.close()
        engine.step({held: [5]}, finished={held: AT_LENGTH})
        assert len([event async for event in first]) == 3
        _, other = await engine.wait_for_requests(2)
        engine.step({other: [5]}, finished={other: AT_LENGTH})
        assert isinstance(await second, Started)
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_ms


async def test_the_blocking_client_serves_threads_side_by_side() -> None:
    engine = FakeEngine(answer(TEXT), chat_template=TEMPLATE)

    def use(client: BlockingClient, number: int) -> None:
        assert client.generate_unary("a", request_id=f"u{number}").text == TEXT
        assert "".join(client.generate("a", orphan_grace_ms=1000).text_deltas()) == TEXT
        assert "".join(client.chat([USER]).text_deltas()) == TEXT
        assert client.chat_unary([USER]).text == TEXT
        items = list(client.generate_batch(["a", [5]]))
        assert sorted(item.item_index for item in items if isinstance(item.event, Finished)) == [0, 1]
        assert [token.token_id for token in client.tokenize_with_places(TEXT)] == client.tokenize(TEXT)
        assert client.apply_chat_template([USER]).text == "[user] the cat\n[assistant] "
        assert "tokenizer.json" in client.get_tokenizer()
        assert client.get_model().name == "tiny"
        for refused in (client.get_request, client.abort):
            with pytest.raises(TriptychError, match="NOT_FOUND"):
                refused(f"nothing {number}")

    async with serving(engine) as (_, frontend):
        with BlockingClient(frontend.address) as client:
            await asyncio.gather(*(asyncio.to_thread(use, client, number) for number in range(4)))


def kept_answer(engine: FakeEngine, request: FakeRequest) -> None:
    """Answer each turn with two tokens, and keep the request for the next."""
    end = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_LENGTH, turn_ended=True)
    if request.entry.resumable:
        engine.step({request: [7, 8]}, finished={request: end}, cached={request: 0})


async def test_a_session_streams_turns_that_continue_each_other() -> None:
    engine = FakeEngine(kept_answer, features=("input_segments",))
    async with serving(engine) as (_, frontend), Client(frontend.address) as client:
        async with client.session(temperature=0.5, job_id="job", session_id="a") as session:
            first = [event async for event in session.generate("the cat", max_tokens=9)]
            second = [event async for event in session.generate([5, 6])]
            session.generate(" and")
            last = [event async for event in session.generate([3], temperature=0.25)]
            with pytest.raises(TypeError, match="model"):
                session.generate([4], model="other")  # type: ignore[call-arg]
        assert [event async for event in session.generate([4])] == []
        end = (await engine.wait_for_requests(5))[-1]
        async with client.session() as session:
            with pytest.raises(TriptychError, match=r"sampling.n is 2"):
                _ = [event async for event in session.generate("a", n=2, temperature=1.0)]
            with pytest.raises(TriptychError, match="INVALID_ARGUMENT"):
                _ = [event async for event in session.generate("a")]
    for events in (first, second, last):
        assert [type(event) for event in events] == [Started, Delta, Finished]
    turns = [request.entry for request in engine.requests[:4]]
    prompts = [
        TOKENIZER.encode("the cat").ids,
        [8, 5, 6],
        [8, *TOKENIZER.encode(" and", add_special_tokens=False).ids],
        [8, 3],
    ]
    assert [request.prompt for request in engine.requests[:4]] == prompts
    assert [turn.sampling.temperature for turn in turns] == [0.5, 0.5, 0.5, 0.25]
    assert turns[0].sampling.max_tokens == 9 != turns[1].sampling.max_tokens
    assert {turn.job_id for turn in turns} == {"job"}
    assert (end.entry.segment, end.entry.resumable) == (4, False)


async def test_a_turn_of_a_session_is_cancelled_and_the_next_goes_on() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, frontend):

        def use(client: BlockingClient) -> list[str]:
            reasons = []
            with client.session() as session:
                for prompt in ([1, 2], [3]):
                    events = session.generate(prompt)
                    assert isinstance(next(events), Started)
                    assert isinstance(next(events), Delta)
                    session.cancel_turn()
                    reasons += [event.reason for event in events if isinstance(event, Finished)]
                waiting = session.generate([4])
                session.close()
                assert list(waiting) == []
            return reasons

        with BlockingClient(frontend.address) as client:
            using = asyncio.ensure_future(asyncio.to_thread(use, client))
            for number in (1, 2):
                request = (await engine.wait_for_requests(number))[-1]
                engine.step({request: [7]}, cached={request: 0})
            assert await using == ["abort", "abort"]
    assert engine.requests[1].prompt == [1, 2, 7, 3]


async def test_the_blocking_client_pools() -> None:
    engine = FakeEngine(pooled, supported_tasks=POOLING)

    def use(client: BlockingClient) -> None:
        assert client.embed([[1, 2]]).embeddings[0].vectors == ((2.0, 1.0),)
        assert len(client.score([[1]], [[2], [3]]).scores) == 2
        assert len(client.rerank([1], [[2], [3]]).documents) == 2
        assert client.classify([[1, 2]]).results[0].vector == (2.0, 1.0)

    async with serving(engine, waits_ready=False) as (served, frontend):
        await served.until_engines_are_ready(1)
        with BlockingClient(frontend.address) as client:
            await asyncio.to_thread(use, client)
