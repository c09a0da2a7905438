"""OpenAI's HTTP API: what the gRPC API answers, in other shapes, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.frontend_svc.fakes import (
    TOKENIZER,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    answer,
    make_request,
    serving,
)
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import session_pb2, step_pb2
from triptych_kit.server import ServiceState
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.traces import recent_spans, setup_telemetry, shutdown_telemetry

TEXT = "the cat sat on the mat"
CHAT = {"messages": [{"role": "user", "content": "the cat"}]}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4738"


@pytest.fixture
def telemetry() -> Iterator[None]:
    setup_telemetry("frontend", instance="0", log_level="error")
    yield
    shutdown_telemetry()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        lines = self.content.decode().split("\n\n")
        assert lines[-1] == ""
        return [
            line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines[:-1]
        ]


class HTTPClient:
    """A connection for each call, in a thread."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> Reply:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()

        def send() -> Reply:
            connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
            with contextlib.closing(connection):
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                found = {name.lower(): value for name, value in response.getheaders()}
                return Reply(response.status, found, response.read())

        return await asyncio.to_thread(send)

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        return await self.call("POST", path, body, **headers)


@contextlib.asynccontextmanager
async def served(engine: FakeEngine | None = None, **options: object) -> AsyncIterator[HTTPClient]:
    chosen = engine or FakeEngine(answer(TEXT), chat_template=TEMPLATE)
    async with serving(chosen, http_port=0, **options) as (_, frontend):
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        try:
            yield HTTPClient(address)
        finally:
            await frontend.servers.http.stop(0)


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


async def test_a_completion_is_what_generate_answers():
    engine = FakeEngine(answer(TEXT))
    async with serving(engine, http_port=0) as (client, frontend):
        http_client = HTTPClient(await frontend.servers.http.start())
        asked = {"prompt": "the cat", "return_token_ids": True, "user": "x", "store": None}
        reply = await http_client.post("/v1/completions", asked)
        expected = await client.inference.GenerateOnce(make_request(), timeout=WAIT_S)
        await frontend.servers.http.stop(0)
    (choice,) = reply.body["choices"]
    assert choice["text"] == expected.outputs[0].text == TEXT
    assert choice["token_ids"] == list(expected.outputs[0].token_ids)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    usage = reply.body["usage"]
    assert usage["prompt_tokens"] == expected.usage.num_prompt_tokens
    assert usage["completion_tokens"] == expected.usage.num_completion_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert reply.headers["x-triptych-ignored-fields"] == "user"


async def test_chunks_together_are_the_whole_answer():
    async with served() as client:
        whole = (await client.post("/v1/chat/completions", CHAT)).body
        options = {"include_usage": True}
        reply = await client.post("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": options})
    *chunks, last, done = reply.events
    assert done == "data: [DONE]"
    assert reply.headers["content-type"].startswith("text/event-stream")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert whole["choices"][0]["message"]["content"] == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert whole["object"] == "chat.completion"
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_several_prompts_are_choices_in_their_order():
    async with served() as client:
        body = {"prompt": ["the", [5, 6, 7]], "n": 2, "temperature": 1.0}
        whole = (await client.post("/v1/completions", body)).body
        streamed = (await client.post("/v1/completions", {**body, "stream": True})).events
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in streamed[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]] == [TEXT] * 4
    assert whole["usage"]["prompt_tokens"] == 4


async def test_parameters_reach_the_engine_by_their_names():
    engine = FakeEngine(answer(TEXT))
    async with served(engine) as client:
        body = {
            "prompt": "the cat",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_k": 3,
            "min_p": 0.25,
            "seed": -1,
            "stop": "zzz",
            "logit_bias": {"5": 2},
            "ignore_eos": True,
            "priority": 4,
            "cache_salt": "s",
            "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        }
        reply = await client.post("/v1/completions", body)
        assert reply.status == 200, reply.content
        (entry,) = [request.entry for request in engine.requests]
    sampling = entry.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.min_p) == (7, 0.5, 3, 0.25)
    assert (sampling.stop_token_ids or sampling.ignore_eos, sampling.logit_bias[0].bias) == (True, 2)
    detection = sampling.repetition_detection
    assert (detection.max_pattern_size, detection.min_pattern_size, detection.min_count) == (4, 1, 3)
    assert (entry.priority, bool(entry.cache_salt)) == (4, True)


async def test_a_job_reaches_the_engine_from_every_body():
    job = {"job_id": "a", "is_last_step": True}
    bodies = {"completions": {"prompt": "the"}, "chat/completions": CHAT, "responses": {"input": "the"}}
    engine = FakeEngine(answer(TEXT), chat_template=TEMPLATE)
    async with served(engine) as client:
        for path, body in bodies.items():
            assert (await client.post(f"/v1/{path}", {**body, **job})).status == 200
            refused = await client.post(f"/v1/{path}", {**body, "job_id": "a\0"})
            assert (refused.status, refused.body["error"]["param"]) == (400, "job_id")
    assert [(bool(one.entry.job_id), one.entry.is_last_step) for one in engine.requests] == [(True, True)] * 3


async def test_the_header_of_a_rank_chooses_it_or_is_refused():
    header = {"x-data-parallel-rank": "0"}
    bodies = {
        "/v1/completions": {"prompt": "the"},
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "the"},
        "/v1/messages": {**CHAT, "max_tokens": 5},
    }
    engine = FakeEngine(answer(TEXT), chat_template=TEMPLATE)
    async with served(engine) as client:
        replies = [await client.post(path, body, **header) for path, body in bodies.items()]
        wrong = [
            await client.post(path, body, **{"x-data-parallel-rank": rank})
            for path, body in bodies.items()
            for rank in ("x", "7")
        ]
        unranked = await client.post("/v1/embeddings", {"input": "the"}, **header)
    assert [reply.status for reply in replies] == [200] * 4
    assert [
        (request.entry.HasField("data_parallel_rank"), request.entry.data_parallel_rank)
        for request in engine.requests
    ] == [(True, 0)] * 4
    for reply in (*wrong, unranked):
        assert reply.status == 400
        assert reply.body["error"]["message"].startswith("x-data-parallel-rank is ")


async def test_a_stream_has_the_ids_of_each_prompt_once():
    asked = {"stream": True, "return_token_ids": True, "temperature": 1.0}
    async with served() as client:
        several = {**asked, "prompt": [[5, 6], [7]], "n": 2}
        completion = (await client.post("/v1/completions", several)).events[:-1]
        echoed = (await client.post("/v1/completions", {**asked, "prompt": [5, 6], "echo": True})).events[:-1]
        chat = (await client.post("/v1/chat/completions", {**CHAT, **asked})).events[:-1]
        whole = (await client.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})).body
    choices = [choice for chunk in completion for choice in chunk["choices"]]
    for index, ids in enumerate([[5, 6], [5, 6], [7], [7]]):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [ids] + [None] * (len(own) - 1)
    assert echoed[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    assert chat[0]["prompt_token_ids"] == whole["prompt_token_ids"] == TOKENIZER.encode("the cat").ids
    assert not any("prompt_token_ids" in chunk for chunk in chat[1:])


WEB = {"type": "web_search", "search_context_size": "low"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PART = "messages[0].content[0]"


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[]", 400, None, "not a JSON object"),
        (b"[" * 100_000, 400, None, ""),
        ({}, 400, "messages", "is missing"),
        ({**CHAT, "max_tokns": 1}, 400, "max_tokns", "is not served"),
        ({**CHAT, "temperature": "hot"}, 400, "temperature", "Expected `float"),
        ({**CHAT, "temperature": 9}, 400, "temperature", "0..2"),
        ({**CHAT, "max_tokens": 1 << 70}, 400, "max_tokens", "out of range"),
        ({**CHAT, "functions": [{"name": "f"}]}, 400, "functions", "use tools"),
        ({**CHAT, "best_of": 2}, 400, "best_of", "must be n"),
        ({**CHAT, "tools": [WEB], "tool_choice": "required"}, 400, "tools[0].type", "demands a call"),
        ({**CHAT, "tools": [{**TOOL, "type": "fuction"}]}, 400, "tools[0].type", "'fuction'"),
        ({**CHAT, "tool_choice": {"type": "custom"}}, 400, "tool_choice.type", "'custom'"),
        ({**CHAT, "tool_choice": {"function": {}}}, 400, "tool_choice.function.name", "is missing"),
        ({**CHAT, "tools": [WEB, {"function": {"name": ""}}]}, 400, "tools[1].function.name", "is ''"),
        ({**CHAT, "n": 2, "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
        ({**CHAT, "model": "other"}, 404, "model", "other"),
        (with_part({"type": "image_url", "image_url": {}}), 400, f"{PART}.type", "images are not served"),
        (with_part({"type": "input_audio", "input_audio": {}}), 400, f"{PART}.type", "sounds are not served"),
        (with_part({"type": "file", "file": {}}), 400, f"{PART}.type", "files are not served"),
        (with_part({"type": "hologram"}), 400, f"{PART}.type", "'hologram', which is not served"),
        (with_part({"type": "text"}), 400, f"{PART}.text", "is missing"),
        (with_part({"text": "x"}), 400, f"{PART}.type", "is missing"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, 400, None, "is missing"),
        ({**CHAT, "guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice", "one constraint"),
        ({**CHAT, "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", "not served with stream"),
        ({**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias.x", "no token id"),
    ],
)
async def test_a_wrong_body_is_an_error_with_its_field(body, status, param, says):
    async with served() as client:
        reply = await client.post("/v1/chat/completions", body)
        after = await client.post("/v1/chat/completions", CHAT)
    error = reply.body["error"]
    assert reply.status == status
    assert says in error["message"]
    assert param is None or error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert after.status == 200


async def test_what_has_no_effect_is_taken_and_named():
    engine = FakeEngine(answer(TEXT), chat_template="{{ tools | tojson }}" + TEMPLATE)
    message = {**CHAT["messages"][0], "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [message],
        "tools": [WEB, TOOL, {"type": "custom", "custom": {"name": "x"}}],
        "client_metadata": {"a": "b"},
        "verbosity": "low",
        "best_of": 1,
        "modalities": ["text"],
        "tool_choice": "none",
    }
    async with served(engine) as client:
        reply = await client.post("/v1/chat/completions", body)
        alone = await client.post("/v1/chat/completions", {**CHAT, "tools": [WEB], "tool_choice": "auto"})
    assert (reply.status, alone.status) == (200, 200), (reply.content, alone.content)
    assert reply.headers["x-triptych-ignored-fields"] == (
        "client_metadata, messages[0].cache_control, tools[0], tools[2], verbosity"
    )
    assert alone.headers["x-triptych-ignored-fields"] == "tools[0]"


async def test_unknown_fields_are_taken_with_an_option():
    body = {**CHAT, "mood\n": "good", "session": 1}
    async with served(http_unknown_fields="ignore") as client:
        reply = await client.post("/v1/chat/completions", body)
        large = await client.post("/v1/chat/completions", {**body, "text": "x" * 100_000})
        misspelt = await client.post("/v1/chat/completions", {**CHAT, "temprature": 1})
    assert (reply.status, large.status, misspelt.status) == (200, 200, 400)
    assert reply.headers["x-triptych-ignored-fields"] == "mood%0A, session"
    assert large.headers["x-triptych-ignored-fields"] == "mood%0A, session, text"


def failing(engine: FakeEngine, request: FakeRequest) -> None:
    engine.step({request: [7]})
    ending = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ERROR, message="logits are not finite")
    engine.step({request: [8]}, finished={request: ending})


async def test_an_output_that_an_error_ends_is_an_error_whole_or_as_the_last_event():
    async with served(FakeEngine(failing)) as client:
        whole = await client.post("/v1/completions", {"prompt": "the"})
        stream = await client.post("/v1/completions", {"prompt": "the", "stream": True})
    assert (whole.status, whole.body["error"]["type"]) == (500, "server_error")
    assert whole.body["error"]["message"] == "logits are not finite"
    assert stream.status == 200
    assert stream.events[-1] == whole.body


async def test_a_client_that_goes_away_aborts_its_request():
    engine = FakeEngine()
    async with served(engine) as client:
        connection = http.client.HTTPConnection(client.address, timeout=WAIT_S)
        for body in ({"prompt": "the"}, {"prompt": "the", "stream": True}):
            num_before = len(engine.requests)
            await asyncio.to_thread(connection.request, "POST", "/v1/completions", json.dumps(body))
            request = (await engine.wait_for_requests(num_before + 1))[-1]
            connection.close()
            await engine.wait(lambda request=request: request.num_aborts > 0)


@contextlib.asynccontextmanager
async def silent_stream(client: HTTPClient, engine: FakeEngine) -> AsyncIterator[SilentStream]:
    connection = http.client.HTTPConnection(client.address, timeout=WAIT_S)
    with contextlib.closing(connection):
        body = json.dumps({"prompt": "the", "stream": True})
        await asyncio.to_thread(connection.request, "POST", "/v1/completions", body)
        (request,) = await engine.wait_for_requests(1)
        yield SilentStream(request, await asyncio.to_thread(connection.getresponse))


@dataclass
class SilentStream:
    """A stream whose request has no output yet."""

    request: FakeRequest
    response: http.client.HTTPResponse

    async def event(self) -> bytes:
        line = await asyncio.to_thread(self.response.readline)
        assert await asyncio.to_thread(self.response.readline) == b"\n"
        return line


async def test_a_stream_that_is_silent_has_heartbeats_before_its_first_event_and_after_it():
    engine = FakeEngine()
    async with (
        served(engine, http_heartbeat_s=0.05) as client,
        silent_stream(client, engine) as stream,
    ):
        assert [await stream.event(), await stream.event()] == [b": heartbeat\n"] * 2
        assert (await client.call("GET", "/load")).body == {"server_load": 1}
        engine.step({stream.request: [7]})
        while not (await stream.event()).startswith(b"data: "):
            pass
        assert await stream.event() == b": heartbeat\n"
        ending = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP)
        engine.step({stream.request: [8]}, finished={stream.request: ending})
        rest = await asyncio.to_thread(stream.response.read)
    assert stream.response.status == 200
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_a_heartbeat_is_the_last_event():
    engine = FakeEngine()
    async with (
        served(engine, http_heartbeat_s=0.05) as client,
        silent_stream(client, engine) as stream,
    ):
        assert await stream.event() == b": heartbeat\n"
        ending = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_ERROR, message="logits are not finite")
        engine.step({stream.request: [7]}, finished={stream.request: ending})
        *_, last, end = (await asyncio.to_thread(stream.response.read)).split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "logits are not finite"
    assert end == b""


async def test_a_client_that_leaves_a_stream_without_events_aborts_its_request():
    engine = FakeEngine()
    async with served(engine, http_heartbeat_s=0.05) as client:
        async with silent_stream(client, engine) as stream:
            assert await stream.event() == b": heartbeat\n"
            stream.response.close()
        await engine.wait(lambda: stream.request.num_aborts > 0)


async def test_models_health_and_version_and_what_there_is_not():
    async with served() as client:
        listed = (await client.call("GET", "/v1/models")).body
        (card,) = listed["data"]
        assert (await client.call("GET", f"/v1/models/{card['id']}")).body == card
        assert (await client.call("GET", "/v1/models/other")).status == 404
        probes = [("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")]
        assert [(await client.call(method, path)).status for method, path in probes] == [200] * 4
        assert "version" in (await client.call("GET", "/version")).body
        missing = await client.call("GET", "/v1/nothing", **{"x-request-id": "mine"})
        wrong = await client.call("GET", "/v1/completions")
        written = await client.call("POST", "/v1/models", {})
    assert (missing.status, missing.body["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert (written.status, written.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.body["error"]["message"].endswith("use POST")
    assert (listed["object"], card["root"]) == ("list", "/models/tiny")


async def test_an_adapter_is_a_model_at_every_route_that_generates():
    engine = FakeEngine(answer(TEXT), chat_template=TEMPLATE, adapters={"cook": "aa" * 32})
    async with served(engine) as client:
        listed = (await client.call("GET", "/v1/models")).body["data"]
        one = (await client.call("GET", "/v1/models/cook")).body
        bodies = {
            "/v1/completions": {"prompt": "the cat"},
            "/v1/chat/completions": CHAT,
            "/v1/responses": {"input": "the cat"},
            "/v1/messages": {**CHAT, "max_tokens": 5},
        }
        replies = {path: await client.post(path, body | {"model": "cook"}) for path, body in bodies.items()}
        tokenized = await client.post("/tokenize", {"model": "cook", "prompt": "the cat"})
        unknown = {path: await client.post(path, body | {"model": "chef"}) for path, body in bodies.items()}
    assert [(card["id"], card["parent"]) for card in listed] == [("tiny", None), ("cook", "tiny")]
    assert one == listed[1]
    assert {path: (reply.status, reply.body["model"]) for path, reply in replies.items()} == dict.fromkeys(
        bodies, (200, "cook")
    )
    assert {request.entry.adapter for request in engine.requests} == {"cook"}
    assert (tokenized.status, len(engine.requests)) == (200, len(bodies))
    assert {reply.status for reply in unknown.values()} == {404}


async def test_a_path_that_is_not_served_is_answered_with_what_is():
    endings = {
        "/chat/completions": "did you mean /v1/chat/completions?",
        "/v1/v1/chat/completions": "did you mean /v1/chat/completions?",
        "/v1/complete": "did you mean /v1/completions?",
        "/v1/files/file-1": "`triptych run-batch` runs a file of requests",
        "/v1/batches": "`triptych run-batch` runs a file of requests",
        "/v1/conversations": "previous_response_id of /v1/responses continues a conversation",
        "/v1/images/generations": "models here read and write text",
        "/api/chat": "use /v1/chat/completions or /v1/completions",
        "/openapi.json": "docs/openai.md lists the routes",
        "/z": "POST /z is not served",
        "/v1/moderations": "POST /v1/moderations is not served",
        "/request": "POST /request is not served",
        "/sleep": "`triptych admin ADDRESS sleep` does it",
        "/v1/load_lora_adapter": "start with --allow-runtime-lora",
        "/" + "v1/chat/completions" * 50: "is not served",
    }
    async with served() as client:
        replies = {path: await client.post(path, {}) for path in endings}
    assert {(reply.status, reply.body["error"]["code"]) for reply in replies.values()} == {
        (404, "unknown_url")
    }
    messages = {path: reply.body["error"]["message"] for path, reply in replies.items()}
    assert [path for path, ending in endings.items() if not messages[path].endswith(ending)] == []


async def test_the_tokenizer_is_described_as_by_vllm():
    engine = FakeEngine()
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "tokenizer_class": "X", "chat_template": "t"}
    engine.files[session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG] = json.dumps(config).encode()
    async with served(engine) as client:
        found = await client.call("GET", "/tokenizer_info")
        other = await client.call("GET", "/tokenizer_info?model=other")
    assert (found.status, found.body) == (200, {**config, "eos_token": "</s>"})
    assert other.status == 404


async def test_a_frontend_that_drains_is_not_ready_and_serves_until_its_lag_is_over():
    async with serving(FakeEngine(answer(TEXT)), http_port=0) as (_, frontend):
        assert frontend.servers.http is not None
        client = HTTPClient(await frontend.servers.http.start())
        frontend.servers.lifecycle.move_to(ServiceState.SERVING)
        before = await client.call("GET", "/ready")
        frontend.servers.lifecycle.move_to(ServiceState.DRAINING)
        ready, health = [await client.call("GET", path) for path in ("/ready", "/health")]
        answered = await client.post("/v1/completions", {"prompt": "the"})
        await frontend.servers.http.stop(0)
    assert [before.status, ready.status, health.status, answered.status] == [200, 503, 200, 200]


async def test_texts_are_tokenized_as_requests_are():
    async with served() as client:
        found = (await client.post("/tokenize", {"prompt": TEXT})).body
        back = (await client.post("/detokenize", {"tokens": found["tokens"]})).body
        of_chat = (await client.post("/tokenize", CHAT)).body
    assert found["tokens"] == TOKENIZER.encode(TEXT).ids
    assert found["count"] == len(found["tokens"])
    assert back == {"prompt": TEXT}
    assert of_chat["tokens"] == TOKENIZER.encode("the cat").ids


async def test_messages_are_tokenized_with_the_options_of_chats():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mood }}{% if add_generation_prompt %}"
    template += "{% if enable_thinking %} thinks{% endif %} on{% endif %}"
    engine = FakeEngine(chat_template=template)
    more = [
        ({}, " on"),
        ({"chat_template_kwargs": {"mood": " sat", "enable_thinking": True}}, " sat thinks on"),
        ({"add_generation_prompt": False}, ""),
        ({"continue_final_message": True}, ""),
        ({"add_special_tokens": False, "documents": [], "mm_processor_kwargs": {}}, " on"),
    ]
    async with served(engine) as client:
        replies = [await client.post("/tokenize", {**CHAT, **fields}) for fields, _ in more]
        shown = await client.post("/tokenize", {**CHAT, "return_token_strs": True})
        refused = await client.post("/tokenize", {**CHAT, "chat_template": template})
        unread = await client.post("/tokenize", {"prompt": "the", "chat_template_kwargs": {"a": 1}})
    texts = [f"the cat{ending}" for _, ending in more]
    assert [reply.body["tokens"] for reply in replies] == [TOKENIZER.encode(text).ids for text in texts]
    assert shown.body["token_strs"] == TOKENIZER.encode("the cat on").tokens
    error = refused.body["error"]
    assert (refused.status, error["param"]) == (400, "chat_template")
    assert error["message"].startswith("chat_template is ")
    assert error["message"].endswith("the frontend has no --request-templates")
    assert unread.headers["x-triptych-ignored-fields"] == "chat_template_kwargs"


SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"
)


async def test_no_message_is_lost_and_one_that_cannot_be_shown_is_refused_by_its_field():
    engine = FakeEngine(answer(TEXT), chat_template=SYSTEM_FIRST)
    user, developer = {"role": "user", "content": "hi"}, {"role": "developer", "content": "D"}
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    late = {"role": "system", "content": "late"}
    turns: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"messages": [developer, user]}, "S:D;hi;"),
        (
            "chat/completions",
            {"messages": [{"role": "system", "content": "S"}, developer, user]},
            "S:S\n\nD;hi;",
        ),
        ("chat/completions", {"messages": [user, refusal, user]}, "hi;no;hi;"),
        ("responses", {"instructions": "I", "input": [developer, user]}, "S:I\n\nD;hi;"),
    ]
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", {"messages": [user, late]}, "messages[1]"),
        ("responses", {"input": [user, late]}, "input[1]"),
        ("messages", {"messages": [user, late]}, "messages[1]"),
    ]
    async with served(engine) as client:
        for path, body, prompt in turns:
            assert (await client.post(f"/v1/{path}", body)).status == 200
            assert TOKENIZER.decode(engine.requests[-1].prompt) == prompt
        for path, body, field in refused:
            reply = await client.post(f"/v1/{path}", body)
            assert reply.status == 400
            assert reply.body["error"]["message"].startswith(f"{field}: the chat template does not show")


async def test_the_id_of_a_call_is_the_clients_own():
    async with served(FakeEngine(answer(TEXT))) as client:
        reply = await client.post("/v1/completions", {"prompt": "the"}, **{"x-request-id": "mine"})
        other = await client.post("/v1/completions", {"prompt": "the"}, **{"x-request-id": "a b"})
    assert (reply.headers["x-request-id"], reply.body["id"]) == ("mine", "cmpl-mine")
    assert other.headers["x-request-id"] != "a b"


async def test_answers_have_the_fingerprint_of_their_engine():
    async with served(
        FakeEngine(answer(TEXT), chat_template=TEMPLATE, fingerprint="0123456789abcdef99")
    ) as client:
        bodies = {"/v1/completions": {"prompt": "the"}, "/v1/chat/completions": CHAT}
        whole = [(await client.post(path, body)).body for path, body in bodies.items()]
        streamed = [
            (await client.post(path, {**body, "stream": True})).events for path, body in bodies.items()
        ]
    chunks = [chunk for events in streamed for chunk in events[:-1]]
    assert {one["system_fingerprint"] for one in [*whole, *chunks]} == {"fp_0123456789abcdef"}


async def test_an_answer_names_its_trace_whose_address_is_that_of_http(telemetry):
    traceparent = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    async with served() as client:
        replies = [
            await client.post("/v1/chat/completions", CHAT),
            await client.post("/v1/chat/completions", {**CHAT, "stream": True}),
            await client.post("/v1/chat/completions", CHAT, **traceparent),
            await client.post("/v1/messages", {**CHAT, "max_tokens": 5}),
        ]
        refused = await client.post("/v1/chat/completions", {})
    trace_ids = [reply.headers["x-trace-id"] for reply in replies]
    roots = [recent_spans(trace_id)[0] for trace_id in trace_ids]
    assert (len(set(trace_ids)), trace_ids[2]) == (4, TRACE_ID)
    assert {root.attributes[names.SERVER_PORT] for root in roots} == {int(client.address.rpartition(":")[2])}
    assert refused.headers["x-trace-id"] not in trace_ids


async def test_every_answer_has_the_ids_of_its_call(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "- {name: ann, key: key-of-ann-0123456789, role: client}\n"
        "- {name: eve, key: key-of-eve-0123456789, role: engine}\n"
    )
    ann, eve = ({"authorization": f"Bearer key-of-{name}-0123456789"} for name in ("ann", "eve"))
    calls = [
        (200, "GET", "/health", {}),
        (401, "GET", "/v1/models", {}),
        (401, "GET", "/metrics", {}),
        (401, "POST", "/v1/messages", {}),
        (403, "GET", "/v1/models", eve),
        (403, "GET", "/v1/models", {"origin": "http://elsewhere.example"}),
        (404, "GET", "/v2/models", ann),
        (405, "POST", "/v1/models", ann),
    ]
    own_ids = {"x-request-id": "mine", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    async with served(api_keys=str(file)) as client:
        for status, method, path, headers in calls:
            own = await client.call(method, path, **headers, **own_ids)
            made = await client.call(method, path, **headers)
            assert (own.status, made.status) == (status, status)
            assert (own.headers["x-request-id"], own.headers["x-trace-id"]) == ("mine", TRACE_ID)
            assert made.headers["x-trace-id"] != TRACE_ID
            assert len(made.headers["x-trace-id"]) == len(made.headers["x-request-id"]) == 32
            assert own.headers.get("request-id") == ("mine" if path == "/v1/messages" else None)


async def test_wrong_keys_of_an_address_are_one_line_of_the_log(tmp_path, caplog):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: ann, key: key-of-ann-0123456789, role: client}\n")
    wrong = {"authorization": "Bearer key-of-eve-0123456789"}
    with caplog.at_level(logging.INFO):
        async with served(api_keys=str(file)) as client:
            replies = [
                await client.call("GET", path, **wrong) for path in ("/v1/models", "/metrics", "/v1/models")
            ]
    assert [reply.status for reply in replies] == [401, 401, 401]
    lines = [record for record in caplog.records if getattr(record, "reason", "") == "UNKNOWN_KEY"]
    assert [(line.getMessage(), line.client) for line in lines] == [("call", "127.0.0.1")]


async def test_answers_show_the_rates_of_tenants_with_limits(tmp_path):
    file = tmp_path / "keys.yaml"
    limits = "requests_per_minute: 2, tokens_per_minute: 6000"
    file.write_text(
        f"- {{name: ann, key: key-of-ann-0123456789, role: client, tenant: a, {limits}}}\n"
        "- {name: bob, key: key-of-bob-0123456789, role: client}\n"
    )
    ann, bob = ({"authorization": f"Bearer key-of-{name}-0123456789"} for name in ("ann", "bob"))
    body = {"prompt": "the", "max_tokens": 1000}
    async with served(FakeEngine(answer(TEXT), max_model_len=4096), api_keys=str(file)) as client:
        replies = [await client.post("/v1/completions", body, **ann) for _ in range(3)]
        other = await client.post("/v1/completions", body, **bob)
    assert [reply.status for reply in replies] == [200, 200, 429]
    found = [
        {
            name.removeprefix("x-ratelimit-"): value
            for name, value in reply.headers.items()
            if "ratelimit" in name
        }
        for reply in (*replies, other)
    ]
    assert [(one["limit-requests"], one["remaining-requests"]) for one in found[:3]] == [
        ("2", "1"),
        ("2", "0"),
        ("2", "0"),
    ]
    assert found[0]["limit-tokens"] == "6000"
    assert 5900 < int(found[0]["remaining-tokens"]) < 6000
    assert found[0]["reset-tokens"] == "1s"
    assert 0 < int(found[2]["reset-requests"].removesuffix("s")) <= 60
    assert found[3] == {}
