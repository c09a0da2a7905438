"""Messages that no honest client serializes are refused by field before an engine gets anything of them."""

from __future__ import annotations

import io

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.frontend_svc.fakes import Client, FakeEngine, answer, make_request, read_all, serving
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2,
    embedding_pb2,
    inference_pb2,
    model_pb2,
    request_pb2,
    tokenizer_pb2,
)
from triptych_kit.limits import PUBLIC
from triptych_kit.telemetry.logs import setup_logs

GENERATE = "/triptych.api.v1.InferenceService/Generate"
CHAT = "/triptych.api.v1.ChatService/Chat"
BATCH = "/triptych.api.v1.InferenceService/GenerateBatch"

PROMPT = "12104f6e63652075706f6e20612074696d65"  # Once upon a time

# Method, message and the field that the violation names.
HIDDEN = {
    "prompt token id 2^32 + 5": (GENERATE, "1a070a0585808080102a0748050d00000000", "token_ids.ids"),
    "logit_bias token id 2^32 + 5": (
        GENERATE,
        f"{PROMPT}2a1548050d000000009a010b088580808010150000803f",
        "sampling.logit_bias",
    ),
    "output_kind 2^32 + 1": (GENERATE, f"{PROMPT}2a0e48050d00000000d0018180808010", "sampling.output_kind"),
    "prompt, then token_ids": (GENERATE, f"{PROMPT}1a030a01052a0748050d00000000", "input"),
    "request_id with terminal escapes": (
        GENERATE,
        f"{PROMPT}2a0748050d00000000320c1b5b33316d7265641b5b306d",
        "request_id",
    ),
    "a role of 2^32 + 3": (CHAT, "120d088380808010120512030a0168", "messages"),
    "an id of 2^32 + 5 in a batch": (BATCH, "0a0b1a090a078580808010ac02", "requests"),
    "a mode and a name of a tool": (CHAT, "120708031203 0a0168 2205 0801 1201 66", "tool_choice.choice"),
    "ids of a text for Detokenize": (
        "/triptych.api.v1.TokenizerService/Detokenize",
        "12058580808010",
        "token_ids",
    ),
    "two inputs for Embed": (
        "/triptych.api.v1.EmbeddingService/Embed",
        "1208 0a0178 1203 0a0105",
        "inputs[0].input",
    ),
    "an output_index of 2^32": (
        "/triptych.api.v1.InferenceService/Resume",
        "0a0178 1a06 088080808010",
        "received",
    ),
}

# Method, prefix, number of the message that wraps, its prefix, unit, count, field.
MANY = {
    "GenerateBatch of 10^5 items": (BATCH, "", None, "", "0a03120178", 100_000, "requests"),
    "Chat of 10^5 messages": (CHAT, "", None, "", "1207080212030a0168", 100_000, "messages"),
    "bad_words of 4 x 10^5 entries": (GENERATE, PROMPT, 5, "4805", "aa010177", 400_000, "sampling.bad_words"),
    "stop of 4 x 10^5 entries": (GENERATE, PROMPT, 5, "4805", "620177", 400_000, "sampling.stop"),
    "ids of 3 x 10^6 entries": (GENERATE, "", 3, "0ac08db701", "05", 3_000_000, "token_ids.ids"),
    "parts of one message, empty": (CHAT, "", 2, "", "1200", 140_000, "messages"),
    "items without a content": (BATCH, "", None, "", "0a00", 140_000, "requests"),
}


def varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7)


async def refusal_of(client: Client, method: str, message: bytes) -> tuple[grpc.StatusCode, list[str]]:
    """The status of a call with `message`, and the fields that its violations name."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.channel.unary_stream(method, None, None)(message, timeout=60):
            pass
    status = rpc_status.from_call(caught.value)
    found = error_details_pb2.BadRequest()
    for detail in status.details if status is not None else ():
        if detail.Unpack(found):
            break
    return caught.value.code(), [violation.field for violation in found.field_violations]


async def test_what_protobuf_hides_is_refused_by_field():
    engine = FakeEngine(answer("a"))
    async with serving(engine) as (client, _):
        for name, (method, content, field) in HIDDEN.items():
            code, fields = await refusal_of(client, method, bytes.fromhex(content))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert field in fields, (name, fields)
        await read_all(client.generate("a"))
    assert len(engine.requests) == 1


ESCAPE = "\x1b[31mred\x9b0m"
# Method, message and the field that has characters a terminal acts on.
UNPRINTABLE = {
    "session_id": (GENERATE, make_request("x", session_id=ESCAPE), "session_id"),
    "cache_salt": (GENERATE, make_request("x", cache_salt=ESCAPE), "cache_salt"),
    "model": (GENERATE, make_request("x", model=ESCAPE), "model"),
    "a line break": (GENERATE, make_request("x", request_id="a\nb"), "request_id"),
    "a line separator": (GENERATE, make_request("x", request_id="a\u2028b"), "request_id"),
    "a right-to-left override": (GENERATE, make_request("x", request_id="a\u202eb"), "request_id"),
    "of a unary call": (
        "/triptych.api.v1.InferenceService/GenerateUnary",
        inference_pb2.GenerateUnaryRequest(request=make_request("x", request_id=ESCAPE)),
        "request_id",
    ),
    "of a chat": (
        "/triptych.api.v1.ChatService/ChatUnary",
        chat_pb2.ChatUnaryRequest(
            request={"messages": [{"role": 3, "parts": [{"text": "h"}]}], "request_id": ESCAPE}
        ),
        "request_id",
    ),
    "of a call in a chat": (
        CHAT,
        chat_message_pb2.ChatRequest(
            messages=[{"role": 4, "tool_calls": [{"id": ESCAPE, "name": "f"}]}],
        ),
        "messages[0].tool_calls[0].id",
    ),
    "of a tool's message": (
        CHAT,
        chat_message_pb2.ChatRequest(messages=[{"role": 5, "tool_call_id": ESCAPE}]),
        "messages[0].tool_call_id",
    ),
    "an author": (
        CHAT,
        chat_message_pb2.ChatRequest(messages=[{"role": 3, "name": ESCAPE, "parts": [{"text": "h"}]}]),
        "messages[0].name",
    ),
    "of an abort": (
        "/triptych.api.v1.RequestService/Abort",
        request_pb2.AbortRequest(request_id=ESCAPE),
        "request_id",
    ),
    "of embeddings": (
        "/triptych.api.v1.EmbeddingService/Embed",
        embedding_pb2.EmbedRequest(inputs=[{"prompt": "x"}], request_id=ESCAPE),
        "request_id",
    ),
    "of a model": (
        "/triptych.api.v1.ModelService/GetModel",
        model_pb2.GetModelRequest(model=ESCAPE),
        "model",
    ),
    "of a tokenizer": (
        "/triptych.api.v1.TokenizerService/GetTokenizer",
        tokenizer_pb2.GetTokenizerRequest(model=ESCAPE),
        "model",
    ),
}


async def test_names_with_control_characters_are_refused_by_field_and_never_logged():
    log = io.StringIO()
    setup_logs("frontend", instance="0", log_format="text", log_level="info", stream=log)
    engine = FakeEngine(answer("a"))
    async with serving(engine) as (client, _):
        for name, (method, message, field) in UNPRINTABLE.items():
            code, fields = await refusal_of(client, method, message.SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert fields == [field], (name, fields)
        # A resume token is looked up alone.
        code, _ = await refusal_of(
            client,
            "/triptych.api.v1.InferenceService/Resume",
            inference_pb2.ResumeRequest(resume_token=ESCAPE).SerializeToString(),
        )
        assert code is grpc.StatusCode.NOT_FOUND
        metadata = (("x-request-id", "a b"), ("traceparent", "00-zz"))
        await read_all(client.generate("a", metadata=metadata))
    assert not engine.requests[1:]
    assert "request_id" in log.getvalue()
    assert all(line.isprintable() for line in log.getvalue().split("\n"))


async def test_a_message_of_very_many_parts_is_refused_by_field_before_it_is_parsed():
    engine = FakeEngine(answer("a"))
    async with serving(engine) as (client, _):
        for name, (method, prefix, wrap, inner, unit, count, field) in MANY.items():
            content = bytes.fromhex(inner) + bytes.fromhex(unit) * count
            if wrap is not None:
                content = varint(wrap << 3 | 2) + varint(len(content)) + content
            code, fields = await refusal_of(client, method, bytes.fromhex(prefix) + content)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert fields == [field], (name, fields)
        await read_all(client.generate("a"))
    assert len(engine.requests) == 1


async def test_a_message_of_the_size_limit_is_read_and_a_byte_more_is_not():
    most = PUBLIC.max_receive_bytes
    content = b"\x12" + varint(most - 5)
    content += b"a" * (most - len(content))
    async with serving(FakeEngine(answer("a"))) as (client, _):
        for message, expected in (
            (content, (grpc.StatusCode.INVALID_ARGUMENT, ["prompt"])),
            (content + b"a", (grpc.StatusCode.RESOURCE_EXHAUSTED, [])),
        ):
            assert await refusal_of(client, GENERATE, message) == expected
        info = await client.model.GetServerInfo(model_pb2.GetServerInfoRequest())
    assert info.limits.max_request_bytes == most


async def test_a_large_message_is_served_after_its_check():
    batch = inference_pb2.GenerateBatchRequest()
    for _ in range(20):
        batch.requests.add(prompt="a", sampling={"max_tokens": 5, "stop": ["b" * 250] * 16})
    assert batch.ByteSize() > 64 * 1024
    async with serving(FakeEngine(answer("a"))) as (client, _):
        responses = [response async for response in client.inference.GenerateBatch(batch)]
    assert sum(response.response.HasField("finished") for response in responses) == 20
