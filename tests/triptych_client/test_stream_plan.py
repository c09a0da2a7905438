"""What follows when a stream fails: another attempt, a Resume, or its error."""

from __future__ import annotations

import array
import hashlib
import json
import math
import struct

import grpc
import pytest

from triptych.api.v1 import chat_message_pb2, generate_pb2, inference_pb2, tokenizer_pb2
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych_client.call_options import CallOptions
from triptych_client.chat_events import ToolCallPiece, assistant_message
from triptych_client.chat_request import ChatMessage, ChatOptions, build_chat_request, build_template_request
from triptych_client.embedding_requests import build_embed_request, build_rerank_request
from triptych_client.embeddings import read_tensor
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Event, Finished, Started, to_completion, to_event
from triptych_client.generate_request import (
    GenerateOptions,
    StreamOptions,
    build_batch_request,
    build_generate_request,
)
from triptych_client.logprobs import TokenLogprob, TopToken, read_logprobs
from triptych_client.prompt_embeds import prompt_embeds
from triptych_client.retry import Attempts, RetryPolicy
from triptych_client.stream_plan import NextCall, StreamPlan
from triptych_client.tokens import FileAssembler
from triptych_kit.clock import FakeClock

BREAK = TriptychError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
UNDELIVERED = TriptychError(grpc.StatusCode.CANCELLED, "CANCELLED")
LEAVES = TriptychError(grpc.StatusCode.UNAVAILABLE, "shutting down", reason="DRAINING", retry_after_ms=1000)
GONE = TriptychError(grpc.StatusCode.NOT_FOUND, "no such stream", reason="NOT_FOUND")
POLICY = RetryPolicy(max_attempts=2, first_backoff_s=0.1)


def plan(
    *, grace_s: float = 1.0, timeout_s: float | None = None, clock: FakeClock | None = None
) -> StreamPlan[Event]:
    attempts = Attempts(POLICY, timeout_s, now=(clock or FakeClock()).now, draw=lambda: 1.0)
    return StreamPlan(to_event, attempts, grace_s=grace_s)


def started(token: str = "t") -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(
        position=1, started=generate_pb2.Started(request_id="r", resume_token=token)
    )


def delta(position: int) -> generate_pb2.GenerateResponse:
    """The message of a position from 2 on: two characters of text, one token."""
    text = generate_pb2.Delta(text=f"é{position}", token_ids=[position])
    return generate_pb2.GenerateResponse(position=position, delta=text)


def resume_after(position: int) -> inference_pb2.ResumeRequest:
    received = inference_pb2.ReceivedOutput(num_tokens=position - 1, num_characters=2 * (position - 1))
    return inference_pb2.ResumeRequest(
        resume_token="t", last_position=position, received=[received] if position > 1 else []
    )


def test_before_the_first_message_the_call_is_made_again() -> None:
    stream = plan()
    assert stream.after_error(BREAK) == NextCall(0.1, None, None)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_stream_that_broke_is_resumed_after_its_last_message_at_once() -> None:
    stream = plan(timeout_s=9.0)
    assert isinstance(stream.take(started()), Started)
    stream.take(delta(2))
    assert stream.after_error(BREAK) == NextCall(0.0, 9.0, resume_after(2))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed (Data frame with END_STREAM flag received)"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    ],
)
def test_a_stream_that_a_proxy_cut_is_resumed(status: grpc.StatusCode, message: str) -> None:
    stream = plan(timeout_s=9.0)
    stream.take(started())
    assert stream.after_error(TriptychError(status, message)) == NextCall(0.0, 9.0, resume_after(1))


def test_a_frontend_that_leaves_breaks_its_streams_and_cannot_resume_them() -> None:
    stream = plan()
    stream.take(started())
    stream.take(delta(2))
    # What it asks a new request to wait is too long for a stream: another frontend has it at once.
    assert [stream.after_error(LEAVES) for _ in range(3)] == [
        NextCall(after_s, None, resume_after(2)) for after_s in (0.0, 0.1, 0.2)
    ]
    with pytest.raises(TriptychError) as caught:
        stream.after_error(GONE)
    assert caught.value is LEAVES


def test_a_resume_that_reaches_a_server_as_it_stops_is_made_again() -> None:
    stream = plan()
    stream.take(started())
    assert stream.after_error(LEAVES).after_s == 0.0
    assert stream.after_error(UNDELIVERED) == NextCall(0.1, None, resume_after(1))


def test_what_was_there_before_is_not_given_twice() -> None:
    stream = plan()
    stream.take(started())
    stream.take(delta(2))
    stream.after_error(BREAK)
    assert stream.take(inference_pb2.ResumeResponse(response=delta(2))) is None
    assert stream.take(inference_pb2.ResumeResponse(response=delta(3))) == Delta(0, "é3", (3,), None)


def test_another_frontend_is_sent_what_was_received_of_each_output() -> None:
    stream = plan()
    stream.take(started())
    for position in (2, 3):
        stream.take(delta(position))
    ended = generate_pb2.GenerateResponse(position=4, finished=generate_pb2.Finished(output_index=1))
    stream.take(ended)
    resume = stream.after_error(BREAK).resume
    assert resume is not None
    received = [
        (one.output_index, one.num_tokens, one.num_characters, one.is_finished) for one in resume.received
    ]
    assert received == [(0, 2, 4, False), (1, 0, 0, True)]


def test_resuming_goes_on_until_the_grace_is_over() -> None:
    clock = FakeClock()
    stream = plan(clock=clock)
    stream.take(started())
    for wait_s in (0.0, 0.1, 0.2, 0.4):
        assert stream.after_error(BREAK).after_s == wait_s
        clock.advance(wait_s)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_message_begins_a_new_grace() -> None:
    clock = FakeClock()
    stream = plan(clock=clock)
    stream.take(started())
    for position in range(2, 6):
        assert stream.after_error(BREAK).after_s == 0.0
        clock.advance(0.9)
        stream.take(delta(position))


def test_the_deadline_ends_the_grace() -> None:
    clock = FakeClock()
    stream = plan(clock=clock, timeout_s=0.5)
    stream.take(started())
    clock.advance(0.5)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(BREAK)
    assert caught.value is BREAK


def test_a_stream_that_is_not_kept_ends_with_what_broke_it() -> None:
    stream = plan()
    stream.take(started())
    stream.after_error(BREAK)
    with pytest.raises(TriptychError) as caught:
        stream.after_error(GONE)
    assert (caught.value, caught.value.__cause__) == (BREAK, GONE)


@pytest.mark.parametrize(
    "error",
    [
        TriptychError(grpc.StatusCode.UNAVAILABLE, "no engine", reason="NO_ENGINE"),
        TriptychError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"),
        TriptychError(grpc.StatusCode.INTERNAL, "internal error, incident 7", reason="INCIDENT"),
    ],
)
def test_an_end_that_the_frontend_reported_is_no_break(error: TriptychError) -> None:
    for is_resumed in (False, True):
        stream = plan()
        stream.take(started())
        if is_resumed:
            stream.after_error(BREAK)
        with pytest.raises(TriptychError) as caught:
            stream.after_error(error)
        assert caught.value is error


@pytest.mark.parametrize(("grace_s", "token"), [(0.0, "t"), (1.0, "")])
def test_without_a_grace_or_a_token_a_break_is_the_end(grace_s: float, token: str) -> None:
    stream = plan(grace_s=grace_s)
    stream.take(started(token))
    with pytest.raises(TriptychError, match="Socket closed"):
        stream.after_error(BREAK)


def test_only_a_request_that_lives_on_is_abandoned_and_once() -> None:
    kept, ended, unkept = plan(), plan(), plan()
    for stream, token in ((kept, "t"), (ended, "t"), (unkept, "")):
        stream.take(started(token))
    ended.end()
    assert [kept.take_abandoned(), ended.take_abandoned(), unkept.take_abandoned()] == ["r", "", ""]
    assert kept.take_abandoned() == ""


# Keyword arguments become the API's fields, and nothing else does.

INPUTS = ("prompt", "token_ids", "embeds")


def test_a_text_and_token_ids_are_different_inputs() -> None:
    assert build_generate_request("", {}).WhichOneof("input") == "prompt"
    assert list(build_generate_request([1, 2], {}).token_ids.ids) == [1, 2]


def test_options_of_a_prompt_go_where_the_api_has_them() -> None:
    request = build_generate_request(
        "a", {"model": "m", "priority": 0, "temperature": 0.0, "stop": ["x", "y"]}
    )
    assert request == generate_pb2.GenerateRequest(
        prompt="a",
        model="m",
        priority=0,
        sampling=sampling_pb2.SamplingParams(temperature=0.0, stop=["x", "y"]),
    )
    assert request.HasField("priority")
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_repetition_detection_is_an_option() -> None:
    detection = sampling_pb2.RepetitionDetection(max_pattern_size=8, min_count=3)
    request = build_generate_request("a", {"repetition_detection": detection})
    assert request.sampling.repetition_detection == detection


def test_no_option_leaves_sampling_unset() -> None:
    assert not build_generate_request("a", {}).HasField("sampling")


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert list(build_generate_request("a", {"stop": "end"}).sampling.stop) == ["end"]


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_generate_request("a", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


def test_every_declared_option_is_a_field_of_the_api() -> None:
    fields = {
        *generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name,
        *sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
    }
    of_call = CallOptions.__annotations__.keys()
    assert StreamOptions.__annotations__.keys() - of_call == fields - {*INPUTS, "sampling"}
    assert (
        GenerateOptions.__annotations__.keys() | {"orphan_grace_ms"} == StreamOptions.__annotations__.keys()
    )


def test_biases_are_by_token_and_output_kinds_by_word() -> None:
    sampling = build_generate_request("a", {"logit_bias": {7: -2.0}, "output_kind": "final_only"}).sampling
    assert list(sampling.logit_bias) == [sampling_pb2.LogitBias(token_id=7, bias=-2.0)]
    assert sampling.output_kind == sampling_pb2.OUTPUT_KIND_FINAL_ONLY
    with pytest.raises(ValueError, match="'all'"):
        build_generate_request("a", {"output_kind": "all"})  # type: ignore[typeddict-item]


def test_what_is_said_of_the_call_is_not_in_the_request() -> None:
    assert build_generate_request("a", {"timeout_s": 1.0, "metadata": {"a": "b"}}).ByteSize() == 3


def test_each_prompt_of_a_batch_may_have_options_of_its_own() -> None:
    each: list[GenerateOptions] = [{"seed": 1}, {"max_tokens": 9}]
    first, second = build_batch_request(["a", [1]], each, {"max_tokens": 3}).requests
    assert (first.sampling.seed, first.sampling.max_tokens, second.sampling.max_tokens) == (1, 3, 9)
    assert len(build_batch_request(["a", "b"], (), {}).requests) == 2
    with pytest.raises(ValueError, match="2 prompts and options for 1"):
        build_batch_request(["a", "b"], each[:1], {})


# Conversations and keyword arguments become the API's fields, and nothing else does.

USER: ChatMessage = {"role": "user", "content": "hi"}
IMAGE = chat_message_pb2.ChatPart(media=generate_pb2.Media(mime_type="image/png", data=b"x"))


def test_messages_keep_their_role_parts_and_calls() -> None:
    messages: list[ChatMessage] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ["see ", IMAGE], "name": "ann"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": "1", "name": "f"}, {"name": "g"}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    system, user, assistant, tool = build_chat_request(messages, {}).messages
    assert (system.role, system.parts[0].text) == (chat_message_pb2.CHAT_ROLE_SYSTEM, "be brief")
    assert (list(user.parts), user.name) == ([chat_message_pb2.ChatPart(text="see "), IMAGE], "ann")
    assert [(call.index, call.id, call.name) for call in assistant.tool_calls] == [
        (0, "1", "f"),
        (1, "", "g"),
    ]
    assert (assistant.reasoning, len(assistant.parts)) == ("hm", 0)
    assert (tool.tool_call_id, len(tool.parts)) == ("1", 1)


def test_options_go_where_the_api_has_them() -> None:
    request = build_chat_request(
        [USER],
        {
            "model": "m",
            "temperature": 0.0,
            "n": 2,
            "stop": "x",
            "parallel_tool_calls": False,
            "enable_thinking": False,
            "template_arguments": {"depth": 2},
            "tools": [{"name": "f", "parameters": {"type": "object"}, "strict": True}],
            "tool_choice": {"name": "f"},
            "timeout_s": 3.0,
        },
    )
    assert request.sampling == sampling_pb2.SamplingParams(temperature=0.0, n=2, stop=["x"])
    assert (request.model, request.HasField("parallel_tool_calls")) == ("m", True)
    assert request.template_options.HasField("enable_thinking")
    assert json.loads(request.template_options.arguments_json) == {"depth": 2}
    assert json.loads(request.tools[0].parameters_json_schema) == {"type": "object"}
    assert request.tools[0].strict
    assert request.tool_choice.name == "f"


@pytest.mark.parametrize("mode", ["none", "auto", "required"])
def test_a_tool_choice_is_a_word_or_a_name(mode: str) -> None:
    request = build_chat_request([USER], {"tool_choice": mode})  # type: ignore[typeddict-item]
    assert request.tool_choice.mode == chat_message_pb2.ToolChoiceMode.Value(
        f"TOOL_CHOICE_MODE_{mode.upper()}"
    )


def test_what_the_api_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="orphan_grace_ms"):
        build_chat_request([USER], {"orphan_grace_ms": 5})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="mood"):
        build_chat_request([{"role": "user", "mood": "good"}], {})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ValueError, match="'robot'"):
        build_chat_request([{"role": "robot"}], {})  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="'any'"):
        build_chat_request([USER], {"tool_choice": "any"})  # type: ignore[typeddict-item]


def test_every_option_of_the_api_is_declared() -> None:
    fields = {
        *chat_message_pb2.ChatRequest.DESCRIPTOR.fields_by_name,
        *sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
        *chat_message_pb2.ChatTemplateOptions.DESCRIPTOR.fields_by_name,
        "template_arguments",
    } - {"messages", "sampling", "template_options", "arguments_json"}
    assert ChatOptions.__annotations__.keys() - CallOptions.__annotations__.keys() == fields


def test_a_rendered_conversation_comes_with_its_tokens() -> None:
    request = build_template_request([USER], {"model": "m", "add_generation_prompt": False})
    assert (request.model, request.tokenize, len(request.messages)) == ("m", True, 1)
    assert request.template_options.HasField("add_generation_prompt")


def test_an_answer_is_the_next_message_of_its_conversation() -> None:
    calls = [ToolCallPiece(0, "1", "f", "{}")]
    message = assistant_message("", "", calls)
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "name": "f", "arguments_json": "{}"}],
    }
    assert assistant_message("a", "b", []) == {"role": "assistant", "content": "a", "reasoning": "b"}


# A tokenizer's files arrive whole or not at all.

CONTENT = b"0123456789"


def chunk(
    offset: int, end: int, *, name: str = "a", content: bytes = CONTENT
) -> tokenizer_pb2.GetTokenizerResponse:
    return tokenizer_pb2.GetTokenizerResponse(
        file_name=name,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
        offset=offset,
        chunk=content[offset:end],
    )


def assembled(*chunks: tokenizer_pb2.GetTokenizerResponse) -> dict[str, bytes]:
    assembler = FileAssembler()
    for each in chunks:
        assembler.add(each)
    return assembler.files()


def test_chunks_of_several_files_are_put_together() -> None:
    files = assembled(chunk(0, 4), chunk(4, 10), chunk(0, 10, name="b"))
    assert files == {"a": CONTENT, "b": CONTENT}


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([chunk(0, 4), chunk(5, 10)], "goes on at byte 5, 4 are here"),
        ([chunk(0, 4)], "did not arrive"),
        ([chunk(0, 10, content=CONTENT[::-1])], "did not arrive"),
    ],
)
def test_what_is_missing_or_changed_is_an_error(chunks, what):
    with pytest.raises(TriptychError, match=what):
        assembled(*chunks)


# Messages of the API become plain data.

REASONS = ("stop", "length", "abort", "error", "repetition")


def test_the_contract_has_no_further_reason() -> None:
    assert output_pb2.FinishReason.values() == list(range(len(REASONS) + 1))


@pytest.mark.parametrize("reason", REASONS)
def test_an_end_says_its_reason_in_a_word(reason: str) -> None:
    value = output_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
    event = to_event(generate_pb2.GenerateResponse(finished=generate_pb2.Finished(reason=value)))
    assert isinstance(event, Finished)
    assert (event.reason, event.stop_match) == (reason, None)
    answer = inference_pb2.GenerateUnaryResponse(outputs=[generate_pb2.Output(reason=value)])
    assert to_completion(answer).outputs[0].reason == reason


# Columns of log probabilities become one record a token.


def test_a_position_without_a_probability_has_none() -> None:
    columns = output_pb2.Logprobs(token_ids=[3, 4], logprobs=[math.nan, -1.0], ranks=[0, 2], texts=["a", ""])
    assert read_logprobs(columns) == (
        TokenLogprob(3, None, None, "a", ()),
        TokenLogprob(4, -1.0, 2, "", ()),
    )


def test_without_detokenizing_there_are_no_texts() -> None:
    top = output_pb2.TopLogprobs(token_ids=[5, 6], logprobs=[-0.5, -2.0])
    columns = output_pb2.Logprobs(token_ids=[6], logprobs=[-2.0], ranks=[2], top=[top])
    assert read_logprobs(columns) == (
        TokenLogprob(6, -2.0, 2, None, (TopToken(5, -0.5, None), TopToken(6, -2.0, None))),
    )


# A prompt of embeddings from whatever holds them.

FLOATS = array.array("f", range(6))


def test_bytes_and_views_become_the_same_prompt() -> None:
    made = prompt_embeds(FLOATS.tobytes(), [3, 2], "float32")
    assert made == prompt_embeds(memoryview(FLOATS), [3, 2], "float32")
    assert (made.embeds.dtype, list(made.embeds.shape)) == (tensor_pb2.D_TYPE_FP32, [3, 2])
    assert build_generate_request(made, {}).embeds == made


def test_a_strided_view_is_read_in_the_order_of_its_indices() -> None:
    made = prompt_embeds(memoryview(FLOATS)[::-2], [3, 1], "float32")
    assert made.embeds.inline == array.array("f", [5, 3, 1]).tobytes()


def test_tokens_and_embeddings_may_be_mixed() -> None:
    made = prompt_embeds(
        bytes(20), [5, 2], "bfloat16", token_ids=[1, 2, 0, 0, 5], is_token=[True, True, False, False, True]
    )
    assert (list(made.token_ids), made.is_token) == ([1, 2, 0, 0, 5], b"\1\1\0\0\1")


def test_an_unknown_type_and_a_negative_size_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'int4', must be one of float32, float16, bfloat16"):
        prompt_embeds(b"", [1, 1], "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        prompt_embeds(b"", [-1, 2], "float32")


# Tensors of pooling models become vectors, or an error that says what they are.

FP32, FP16, BF16 = tensor_pb2.D_TYPE_FP32, tensor_pb2.D_TYPE_FP16, tensor_pb2.D_TYPE_BF16
NUMBERS = (1.0, -2.5, 0.0, 4.0)
BYTES = {
    FP32: struct.pack("<4f", *NUMBERS),
    FP16: struct.pack("<4e", *NUMBERS),
    BF16: b"".join(struct.pack("<f", number)[2:] for number in NUMBERS),
}


@pytest.mark.parametrize("dtype", BYTES, ids=tensor_pb2.DType.Name)
def test_numbers_are_the_same_in_every_type(dtype: tensor_pb2.DType) -> None:
    flat = tensor_pb2.Tensor(dtype=dtype, shape=[4], inline=BYTES[dtype])
    rows = tensor_pb2.Tensor(dtype=dtype, shape=[2, 2], inline=BYTES[dtype])
    assert read_tensor(flat).vectors == (NUMBERS,)
    assert read_tensor(rows).vectors == (NUMBERS[:2], NUMBERS[2:])
    assert read_tensor(rows).vector == NUMBERS[:2]


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (tensor_pb2.Tensor(dtype=FP32, shape=[3], inline=BYTES[FP32]), r"\[3\] and 4 numbers"),
        (tensor_pb2.Tensor(dtype=FP32, shape=[1, 2, 2], inline=BYTES[FP32]), r"\[1, 2, 2\]"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT64, shape=[2], inline=BYTES[FP32]), "INT64"),
        (tensor_pb2.Tensor(dtype=FP32, shape=[4]), "kept elsewhere"),
    ],
)
def test_what_is_no_vector_is_an_error(tensor: tensor_pb2.Tensor, what: str) -> None:
    with pytest.raises(TriptychError, match=what):
        read_tensor(tensor)


def test_options_of_vectors_are_those_of_pooling() -> None:
    request = build_embed_request(
        ["a", [1, 2]], {"dimensions": 8, "per_token": True, "model": "m", "truncate_prompt_tokens": 5}
    )
    assert request.pooling == sampling_pb2.PoolingParams(
        task=sampling_pb2.POOLING_TASK_TOKEN_EMBED, dimensions=8
    )
    assert [entry.WhichOneof("input") for entry in request.inputs] == ["prompt", "token_ids"]
    assert (request.model, request.truncate_prompt_tokens) == ("m", 5)


def test_one_text_is_not_taken_for_its_letters() -> None:
    with pytest.raises(TypeError, match="list of texts"):
        build_rerank_request("q", "document", {})
