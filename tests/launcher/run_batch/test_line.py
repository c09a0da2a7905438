"""What a line of a batch means, and what is wrong with one that means nothing."""

from __future__ import annotations

import json

import pytest

from launcher.run_batch.line import answer_record, error_record, read_line
from service_kit.errors import InvalidArgument, Unavailable
from triptych.api.v1 import chat_message_pb2, generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2


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
        ({"custom_id": "a", "body": {}}, "call", "call is None, not one of generate, chat"),
        ({"custom_id": "a", "call": "embed", "body": {}}, "call", "embed"),
        ({"custom_id": "a", "call": ["x"], "body": {}}, "call", "not one of"),
        ({"custom_id": "a", "call": "generate"}, "body", "body is not a JSON object"),
        ({"custom_id": "a", "call": "generate", "body": {"promt": "x"}}, "body", "promt"),
        ({"custom_id": "a", "call": "generate", "body": {"sampling": {"top_k": "x"}}}, "body", "top_k"),
        ({"custom_id": "a", "call": "generate", "body": {"priority": True}}, "body", "priority"),
        ({"custom_id": "a", "call": "generate", "method": "POST", "body": {}}, "method", "method"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url", "/v1/embeddings"),
        ({"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}, "method", "GET"),
    ],
)
def test_what_is_wrong_is_named(fields: dict, field: str, message: str) -> None:
    refused = refusal_of(**fields)
    assert [name for name, _ in refused.violations] == [field]
    assert message in refused.message


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


def test_the_result_of_a_refusal_has_code_message_and_violations() -> None:
    line = line_of(custom_id="a", call="generate", body={})
    assert error_record(line, InvalidArgument("n is 99", field="sampling.n")) == {
        "custom_id": "a",
        "line": 3,
        "response": None,
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "n is 99",
            "violations": [{"field": "sampling.n", "description": "n is 99"}],
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
