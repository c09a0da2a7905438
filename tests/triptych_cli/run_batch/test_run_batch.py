"""The verb `run-batch` against a frontend that answers each prompt with itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.triptych_cli.fakes import Outcome, triptych
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_cli.run_batch.files import (
    MAX_LINE_BYTES,
    BatchFileError,
    Done,
    count_lines,
    open_output,
    read_lines,
)
from triptych_cli.run_batch.line import answer_record, error_record, read_line
from triptych_kit.errors import InvalidArgument, ResourceExhausted, Unavailable
from triptych_kit.server import PUBLIC, Registration, Server

WAIT_S = 60.0


@dataclass
class EchoFrontend(inference_pb2_grpc.InferenceServiceServicer):
    """Answers a prompt with itself; "bad" is refused, "hang" never answered, "busy" so many times too much.

    "first" waits until `first_waits_for` other prompts were answered, and all until `together` came at once.
    """

    num_busy: int = 0
    first_waits_for: int = 0
    together: int = 1
    prompts: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_in_flight: int = 0
    max_in_flight: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def GenerateOnce(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateUnaryResponse:
        prompt = request.prompt
        self.prompts.append(prompt)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if self.num_in_flight >= self.together:
            self.there.set()
        try:
            await self.there.wait()
            await self._wait(prompt)
        finally:
            self.num_in_flight -= 1
        self.num_answered += 1
        if self.num_answered >= self.first_waits_for:
            self.enough.set()
        return inference_pb2.GenerateUnaryResponse(outputs=[generate_pb2.Output(text=prompt)])

    async def _wait(self, prompt: str) -> None:
        if prompt == "bad":
            raise InvalidArgument("n is 99, the range is 1..64", field="sampling.n")
        if prompt == "busy" and self.num_busy:
            self.num_busy -= 1
            raise ResourceExhausted("too many", retry_after_ms=1)
        if prompt == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        if prompt == "first":
            await self.enough.wait()


@asynccontextmanager
async def serving(frontend: EchoFrontend) -> AsyncIterator[str]:
    add = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, frontend)
    registration = Registration("triptych.api.v1.InferenceService", add, is_ready=True)
    server = Server(listen="127.0.0.1:0", registrations=[registration], profile=PUBLIC, service="frontend")
    address = await server.start()
    try:
        yield f"--url=grpc://{address}"
    finally:
        await server.stop(0)


def lines_of(*prompts: str) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"id-{index}", "call": "generate", "body": {"prompt": prompt}}
        for index, prompt in enumerate(prompts)
    ]


class Files:
    """The two files of a batch."""

    def __init__(self, folder: Path, lines: list[dict[str, Any]]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def run(self, *arguments: str, interrupt_when: asyncio.Event | None = None) -> Outcome:
        return await triptych(
            *("run-batch", "-i", str(self.input), "--output-file", str(self.output), *arguments),
            interrupt_when=interrupt_when,
        )

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def texts(self) -> list[str | None]:
        responses = [result["response"] for result in self.results()]
        return [response and response["outputs"][0]["text"] for response in responses]


async def test_results_come_in_the_order_of_the_input_whatever_is_answered_first(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("first", *(f"p{index}" for index in range(20))))
    async with serving(EchoFrontend(first_waits_for=7)) as url:
        outcome = await files.run(url, "--concurrency=4")
    assert outcome.exit_code == 0
    assert outcome.err == "21 lines: 21 answered, 0 failed, 0 done before\n"
    assert files.texts() == ["first", *(f"p{index}" for index in range(20))]
    assert [result["custom_id"] for result in files.results()] == [f"id-{index}" for index in range(21)]


async def test_no_more_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    frontend = EchoFrontend(together=3)
    files = Files(tmp_path, lines_of(*("p" for _ in range(31))))
    async with serving(frontend) as url:
        await files.run(url, "--concurrency=3")
    assert (frontend.max_in_flight, frontend.num_answered) == (3, 31)


async def test_bad_lines_fail_alone(tmp_path: Path) -> None:
    lines = lines_of("a", "bad", "b")
    lines.insert(1, {"custom_id": "wrong", "call": "nothing", "body": {}})
    lines.append({**lines[0], "body": {"prompt": "again"}})
    files = Files(tmp_path, lines)
    async with serving(EchoFrontend()) as url:
        outcome = await files.run(url)
    assert outcome.exit_code == 1
    counts, cause = outcome.err.splitlines()
    assert counts == "5 lines: 2 answered, 3 failed, 0 done before"
    assert cause.startswith("first failure: line 2: INVALID_ARGUMENT: call is 'nothing'")
    assert files.texts() == ["a", None, None, "b", None]
    errors = [result["error"] for result in files.results()]
    assert [error and error["code"] for error in errors] == [
        None,
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        None,
        "INVALID_ARGUMENT",
    ]
    assert [error and error["violations"][0]["field"] for error in errors] == [
        None,
        "call",
        "sampling.n",
        None,
        "custom_id",
    ]


async def test_what_the_server_does_not_serve_is_an_error_of_its_line(tmp_path: Path) -> None:
    chat = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}]},
    }
    files = Files(tmp_path, [chat, *lines_of("a")])
    async with serving(EchoFrontend()) as url:
        outcome = await files.run(url)
    assert outcome.exit_code == 1
    assert [result["error"] and result["error"]["code"] for result in files.results()] == [
        "UNIMPLEMENTED",
        None,
    ]


async def test_a_busy_server_is_asked_again_within_the_limit(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("busy"))
    frontend = EchoFrontend(num_busy=2)
    async with serving(frontend) as url:
        assert (await files.run(url, "--max-attempts=3")).exit_code == 0
    assert len(frontend.prompts) == 3
    files.output.unlink()
    async with serving(EchoFrontend(num_busy=2)) as url:
        assert (await files.run(url, "--max-attempts=2")).exit_code == 1
    assert files.results()[0]["error"]["code"] == "RESOURCE_EXHAUSTED"


async def test_an_interrupted_batch_goes_on_without_asking_again(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("a", "b", "hang", "c"))
    frontend = EchoFrontend()
    async with serving(frontend) as url:
        outcome = await files.run(url, "--concurrency=1", interrupt_when=frontend.hanging)
    assert outcome.exit_code == 130
    assert "--resume continues" in outcome.err
    assert files.texts() == ["a", "b"]
    files.input.write_text(files.input.read_text().replace("hang", "works"))
    again = EchoFrontend()
    async with serving(again) as url:
        refused = await files.run(url)
        outcome = await files.run(url, "--resume")
    assert (refused.exit_code, outcome.exit_code) == (2, 0)
    assert again.prompts == ["works", "c"]
    assert files.texts() == ["a", "b", "works", "c"]


async def test_a_failure_before_a_resume_still_makes_exit_code_1(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("bad", "a"))
    async with serving(EchoFrontend()) as url:
        await files.run(url)
        outcome = await files.run(url, "--resume")
    assert outcome.exit_code == 1
    assert outcome.err == "2 lines: 0 answered, 0 failed, 2 done before, 1 of them failed\n"


async def test_a_server_that_is_not_there_costs_no_line(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("a"))
    outcome = await files.run("--url=grpc://127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("no server answers at 127.0.0.1:1: is `triptych serve` running?")
    assert files.results() == []


async def test_files_that_cannot_be_used_are_exit_code_2(tmp_path: Path) -> None:
    outcome = await triptych("run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert outcome.exit_code == 2
    assert "cannot read" in outcome.err


# What a line of a batch means, and what is wrong with one that means nothing.


def line_of(**fields):
    return read_line(3, json.dumps(fields).encode(), "default")


def refusal_of(**fields) -> InvalidArgument:
    refused = line_of(**fields).request
    assert isinstance(refused, InvalidArgument)
    return refused


def test_a_body_is_the_json_form_of_the_request() -> None:
    body = {"prompt": "hi", "sampling": {"max_tokens": "3", "stop": ["x"], "seed": 7}, "priority": -2}
    line = line_of(custom_id="a", call="generate", body=body)
    assert (line.number, line.custom_id) == (3, "a")
    assert isinstance(line.request, generate_pb2.GenerateRequest)
    assert (line.request.prompt, line.request.sampling.max_tokens, line.request.priority) == ("hi", 3, -2)


def test_a_line_without_a_model_gets_the_default_one_and_one_with_keeps_it() -> None:
    assert line_of(custom_id="a", call="generate", body={}).request.model == "default"
    assert line_of(custom_id="a", call="generate", body={"model": "own"}).request.model == "own"


def test_a_chat_is_a_chat_request() -> None:
    messages = [{"role": "CHAT_ROLE_USER", "parts": [{"text": "hi"}]}]
    request = line_of(custom_id="a", call="chat", body={"messages": messages}).request
    assert isinstance(request, chat_message_pb2.ChatRequest)
    assert request.messages[0].parts[0].text == "hi"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"call": "generate", "body": {}}, "custom_id", "custom_id"),
        ({"custom_id": 5, "call": "generate", "body": {}}, "custom_id", "custom_id"),
        ({"custom_id": "a", "body": {}}, "call", "call is not set, not one of generate, chat"),
        ({"custom_id": "a", "call": "embed", "body": {}}, "call", "embed"),
        ({"custom_id": "a", "call": ["x"], "body": {}}, "call", "not one of"),
        ({"custom_id": "a", "call": "generate"}, "body", "body is not a JSON object"),
        (
            {"custom_id": "a", "call": "generate", "body": {"promt": "x"}},
            "body.promt",
            "body has no field 'promt'; did you mean prompt?",
        ),
        (
            {"custom_id": "a", "call": "chat", "body": {"messages": [{"role": "user"}]}},
            "body.messages[0].role",
            "is 'user', must be one of CHAT_ROLE_UNSPECIFIED, CHAT_ROLE_SYSTEM",
        ),
        (
            {"custom_id": "a", "call": "generate", "body": {"prompt": 5}},
            "body.prompt",
            "body.prompt is 5, must be a text",
        ),
        (
            {"custom_id": "a", "call": "generate", "body": {"prompt": "a", "tokenIds": {}}},
            "body",
            'should not have multiple "input" oneof fields',
        ),
        (
            {"custom_id": "a", "call": "generate", "body": {"sampling": {"top_k": "x"}}},
            "body.sampling.top_k",
            "body.sampling.top_k is 'x', must be an integer",
        ),
        ({"custom_id": "a", "call": "generate", "body": {"priority": True}}, "body.priority", "priority"),
        ({"custom_id": "a", "call": "generate", "method": "POST", "body": {}}, "method", "method"),
        ({"custom_id": "a", "cal": "generate"}, "cal", "a line has no field 'cal'; did you mean call?"),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"promt": "hi"}},
            "promt",
            "promt is not served; did you mean prompt?",
        ),
        (
            {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [], "max_tokns": 4}},
            "max_tokns",
            "max_tokns is not served; did you mean max_tokens?",
        ),
        (
            {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"contents": "hi"}]}},
            "messages[0].contents",
            "contents is not served; did you mean content?",
        ),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url", "/v1/embeddings"),
        ({"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}, "method", "GET"),
    ],
)
def test_what_is_wrong_is_named(fields: dict, field: str, message: str) -> None:
    refused = refusal_of(**fields)
    assert [name for name, _ in refused.violations] == [field]
    assert message in refused.message
    # No type of protobuf, whose names are not those of the line.
    assert not re.search("Message type|GenerateRequest|Available Fields", refused.message)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_object_is_an_error_of_its_line(text: bytes) -> None:
    line = read_line(1, text, "")
    assert line.custom_id is None
    assert isinstance(line.request, InvalidArgument)


def test_a_wrong_line_keeps_its_id() -> None:
    assert line_of(custom_id="a", call="nothing").custom_id == "a"


def test_the_result_of_an_answer_has_every_field_under_its_name() -> None:
    answer = inference_pb2.GenerateUnaryResponse(
        outputs=[generate_pb2.Output(text="x", token_ids=[4], reason=output_pb2.FINISH_REASON_STOP)]
    )
    record = answer_record(line_of(custom_id="a", call="generate", body={}), answer)
    assert (record["custom_id"], record["line"], record["error"]) == ("a", 3, None)
    [output] = record["response"]["outputs"]
    assert (output["output_index"], output["token_ids"], output["reason"]) == (0, [4], "FINISH_REASON_STOP")


def test_the_answer_to_a_line_of_openai_has_the_shape_of_openai() -> None:
    line = line_of(custom_id="a", url="/v1/completions", body={"model": "m", "prompt": "hi", "max_tokens": 4})
    answer = inference_pb2.GenerateUnaryResponse(
        started=generate_pb2.Started(request_id="r", model="m", fingerprint="f"),
        outputs=[generate_pb2.Output(text="x", token_ids=[4] * 4, reason=output_pb2.FINISH_REASON_LENGTH)],
        usage=output_pb2.Usage(num_prompt_tokens=2, num_completion_tokens=4),
    )
    record = answer_record(line, answer)
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert record["id"].startswith("batch_req_")
    assert record["id"] != answer_record(line, answer)["id"]
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("text_completion", "m", "fp_f")
    assert body["choices"] == [{"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}]
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


def test_the_answer_to_a_chat_of_openai_has_message_calls_and_logprobs() -> None:
    message = {"role": "user", "content": "hi"}
    line = line_of(custom_id="a", url="/v1/chat/completions", body={"model": "m", "messages": [message]})
    call = chat_message_pb2.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')
    logprobs = output_pb2.Logprobs(token_ids=[4], logprobs=[-0.5], ranks=[1], texts=["x"])
    output = chat_message_pb2.ChatOutput(
        message=chat_message_pb2.ChatMessage(tool_calls=[call]),
        logprobs=logprobs,
        reason=output_pb2.FINISH_REASON_STOP,
    )
    body = answer_record(line, chat_pb2.ChatUnaryResponse(outputs=[output]))["response"]["body"]
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    token = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    assert choice["logprobs"] == {"content": [token]}


def test_a_refused_line_of_openai_has_an_id() -> None:
    line = line_of(custom_id="a", url="/v1/completions", body={"prompt": "hi", "max_tokens": "many"})
    assert isinstance(line.request, InvalidArgument)
    record = error_record(line, line.request)
    assert (record["id"][:10], record["response"]) == ("batch_req_", None)


def test_the_result_of_a_refusal_has_code_message_and_violations() -> None:
    line = line_of(custom_id="a", call="generate", body={})
    assert error_record(line, InvalidArgument("n is 99", field="sampling.n")) == {
        "custom_id": "a",
        "line": 3,
        "response": None,
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "n is 99",
            # The message describes it.
            "violations": [{"field": "sampling.n"}],
        },
    }
    assert error_record(line, Unavailable("gone"))["error"]["violations"] == []


@pytest.mark.parametrize("value", [True, False, 5.5, "many", [5]])
def test_127_a_thinking_budget_of_another_type_is_refused(value: object) -> None:
    for call in ("generate", "chat"):
        body = {"sampling": {"thinking_token_budget": value}}
        refused = refusal_of(custom_id="a", call=call, body=body)
        assert "thinking_token_budget" in refused.message


@pytest.mark.parametrize("value", [5, 5.0, "5"])
def test_127_a_thinking_budget_is_read_as_the_json_form_of_protobuf_has_whole_numbers(value: object) -> None:
    # JSON has one kind of number: its writers may spell five as 5.0, and large ones as texts.
    line = line_of(custom_id="a", call="chat", body={"sampling": {"thinking_token_budget": value}})
    assert line.request.sampling.thinking_token_budget == 5


# The files of a batch: what is read, what is kept, where it goes on.


def record(line: int, custom_id: str | None = None, *, failed: bool = False) -> bytes:
    error = {"code": "INTERNAL"} if failed else None
    return (
        json.dumps({"custom_id": custom_id, "line": line, "response": None, "error": error}).encode() + b"\n"
    )


def done_of(tmp_path: Path, content: bytes) -> tuple[Done, bytes]:
    """What an output with this content holds, and the file after one more line was written to it."""
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"")
    path.write_bytes(content)
    output, done = open_output(source, path, resume=True)
    with output:
        output.write(b"next\n")
    return done, path.read_bytes()


def test_empty_lines_are_no_requests_but_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n \nb")
    assert list(read_lines(path)) == [(1, b"a\n"), (4, b"b")]
    assert count_lines(path) == 2


def test_a_line_above_the_limit_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\nb\n")
    (first, cut), second = read_lines(path)
    assert (first, len(cut)) == (1, MAX_LINE_BYTES + 1)
    assert second == (2, b"b\n")


def test_a_new_output_has_nothing_done(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"")
    output, done = open_output(source, tmp_path / "out", resume=False)
    output.close()
    assert (done.custom_ids, done.unnamed_lines, done.num_failed) == (set(), set(), 0)


def test_resuming_knows_ids_nameless_lines_and_failures(tmp_path: Path) -> None:
    content = record(1, "a") + record(2, "b", failed=True) + record(3, failed=True)
    done, after = done_of(tmp_path, content)
    assert (done.custom_ids, done.unnamed_lines, done.num_failed) == ({"a", "b"}, {3}, 2)
    assert after == content + b"next\n"


def test_a_last_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    done, after = done_of(tmp_path, record(1, "a") + record(2, "b")[:-10])
    assert done.custom_ids == {"a"}
    assert after == record(1, "a") + b"next\n"


@pytest.mark.parametrize("content", [b"{}\n", b"text\n", b"[1]\n", b"[" * 100_000 + b"\n"])
def test_a_file_that_is_no_output_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BatchFileError, match=r"line 1 of .* is not a result"):
        done_of(tmp_path, content)
    assert (tmp_path / "out").read_bytes() == content


def test_results_are_not_overwritten_without_the_flag(tmp_path: Path) -> None:
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"")
    path.write_bytes(record(1, "a"))
    with pytest.raises(BatchFileError, match="--resume"):
        open_output(source, path, resume=False)


def test_an_input_is_not_its_own_output(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"")
    with pytest.raises(BatchFileError, match="at once"):
        open_output(path, path, resume=True)


def test_an_output_that_cannot_be_read_back_is_refused_with_the_reason(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"{}\n")
    os.mkfifo(pipe)
    with pytest.raises(BatchFileError, match=r"cannot write .*out: .*not seekable"):
        open_output(source, pipe, resume=False)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*nothing"):
        count_lines(tmp_path / "nothing")
    with pytest.raises(BatchFileError, match=r"cannot write .*out"):
        open_output(tmp_path / "in", tmp_path / "folder" / "out", resume=False)


# OpenAI's batch lines as requests of this API.

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def request_of(url: str, **body):
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    return read_line(1, json.dumps(line).encode(), "").request


def test_a_completion_keeps_every_common_field() -> None:
    request = request_of(
        COMPLETIONS,
        model="m",
        prompt="hi",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        n=2,
        stop=["a", "b"],
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logprobs=3,
    )
    sampling = request.sampling
    assert (request.model, request.prompt) == ("m", "hi")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.n) == (9, 0.5, 0.25, 2)
    assert (list(sampling.stop), sampling.seed, sampling.logprobs) == (["a", "b"], 7, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)


def test_a_prompt_may_be_ids_and_a_stop_one_text() -> None:
    request = request_of(COMPLETIONS, prompt=[1, 2], stop="x")
    assert list(request.token_ids.ids) == [1, 2]
    assert list(request.sampling.stop) == ["x"]


def test_a_line_has_what_the_http_api_serves() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    request = request_of(
        CHAT,
        messages=[USER],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        response_format={"type": "json_object"},
        top_k=5,
        user="x",
    )
    assert isinstance(request, chat_message_pb2.ChatRequest)
    assert [tool.name for tool in request.tools] == ["add"]
    assert request.tool_choice.mode == chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED
    assert (request.sampling.structured_output.json_object, request.sampling.top_k) == (True, 5)


def test_a_completion_without_max_tokens_has_openais_default_and_a_chat_what_fits() -> None:
    assert request_of(COMPLETIONS, prompt="x").sampling.max_tokens == 16
    assert not request_of(CHAT, messages=[USER]).sampling.HasField("max_tokens")


def test_null_counts_as_left_out() -> None:
    request = request_of(CHAT, messages=[USER], temperature=None, suffix=None)
    assert not request.sampling.HasField("temperature")


def test_a_conversation_keeps_roles_parts_calls_and_answers() -> None:
    request = request_of(
        CHAT,
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "lee",
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ],
    )
    assert isinstance(request, chat_message_pb2.ChatRequest)
    system, user, assistant, tool = request.messages
    assert system.role == chat_message_pb2.CHAT_ROLE_SYSTEM
    assert ([part.text for part in user.parts], user.name) == (["a", "b"], "lee")
    [call] = assistant.tool_calls
    assert (call.id, call.name, call.arguments_json) == ("c1", "f", "{}")
    assert (tool.role, tool.tool_call_id) == (chat_message_pb2.CHAT_ROLE_TOOL, "c1")


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": False}, None)],
)
def test_logprobs_of_a_chat_are_switched_and_counted_apart(fields: dict, logprobs: int | None) -> None:
    sampling = request_of(CHAT, messages=[USER], max_completion_tokens=5, **fields).sampling
    assert sampling.max_tokens == 5
    assert (sampling.logprobs if sampling.HasField("logprobs") else None) == logprobs


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "messages": []}, "messages"),
        (CHAT, {"messages": [USER], "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": [USER], "stream": True}, "stream"),
        (CHAT, {"messages": [USER], "return_token_ids": True}, "return_token_ids"),
        (CHAT, {"messages": [USER], "include_reasoning": False}, "include_reasoning"),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [USER], "logprobs": 2}, "logprobs"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (CHAT, {"messages": [USER], "temperature": "hot"}, "temperature"),
    ],
)
def test_what_is_not_served_or_wrong_is_refused_by_name(url: str, body: dict, field: str) -> None:
    refused = request_of(url, **body)
    assert isinstance(refused, InvalidArgument)
    assert [name for name, _ in refused.violations] == [field]
