"""Chat over gRPC: prompts by the model's template, answers taken apart, calls that are demanded."""

from __future__ import annotations

import json
from collections.abc import Sequence

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_EOS,
    AT_LENGTH,
    EOS_ID,
    TOKENIZER,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    Script,
    answer,
    details_of,
    refusing,
    serving,
)
from triptych.api.v1 import chat_message_pb2, chat_pb2, tokenizer_pb2
from triptych.common.v1 import output_pb2, sampling_pb2

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
USER = chat_message_pb2.ChatMessage(
    role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text="the cat")]
)
ADD = chat_message_pb2.Tool(name="add", description="adds", parameters_json_schema='{"type": "object"}')


def ask(**fields) -> chat_message_pb2.ChatRequest:
    return chat_message_pb2.ChatRequest(**{"messages": [USER], **fields})


def thinking(text: str) -> str:
    return f"the dog\n</think>\n\n{text}"


async def read(call) -> tuple[chat_message_pb2.ChatDelta, list[chat_message_pb2.ChatResponse]]:
    """All deltas of output 0 put together, and every message."""
    whole, messages = chat_message_pb2.ChatDelta(), []
    async for response in call:
        messages.append(response)
        delta = response.delta
        whole.content += delta.content
        whole.reasoning += delta.reasoning
        whole.token_ids.extend(delta.token_ids)
        for piece in delta.tool_calls:
            while len(whole.tool_calls) <= piece.index:
                whole.tool_calls.add()
            call_ = whole.tool_calls[piece.index]
            call_.id, call_.name = call_.id + piece.id, call_.name + piece.name
            call_.arguments_json += piece.arguments_json
            call_.incomplete |= piece.incomplete
    assert [message.position for message in messages] == list(range(1, len(messages) + 1))
    return whole, messages


def prompt_of(request: FakeRequest) -> str:
    return TOKENIZER.decode(request.prompt, skip_special_tokens=False)


async def test_a_conversation_becomes_the_prompt_that_the_template_makes():
    engine = FakeEngine(answer("a mat"), chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        whole, messages = await read(client.chat.Chat(ask(), timeout=WAIT_S))
        rendered = await client.tokenizer.ApplyChatTemplate(
            tokenizer_pb2.ApplyChatTemplateRequest(messages=[USER], tools=[ADD], tokenize=True)
        )
    assert prompt_of(engine.requests[0]) == "[user] the cat\n[assistant] "
    assert rendered.prompt == "<tool_call> add\n[user] the cat\n[assistant] "
    assert list(rendered.token_ids) == TOKENIZER.encode(rendered.prompt).ids
    assert (whole.content, whole.reasoning) == ("a mat", "")
    assert messages[0].started.num_prompt_tokens == len(engine.requests[0].prompt)
    assert messages[-1].finished.reason == output_pb2.FINISH_REASON_STOP


async def test_content_reasoning_and_calls_are_separated_in_a_stream_and_at_once():
    text = thinking("I add. " + CALL)
    engine = FakeEngine(answer(text), chat_template=TEMPLATE)
    request = ask(tools=[ADD], template_options={"enable_thinking": True})
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
        unary = await client.chat.ChatOnce(request, timeout=WAIT_S)
        wrapped = await client.chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=request), timeout=WAIT_S)
    assert prompt_of(engine.requests[0]).endswith("[assistant] <think>\n")
    (call,) = whole.tool_calls
    assert (whole.reasoning, whole.content.strip()) == ("the dog", "I add.")
    assert (call.name, call.arguments_json) == ("add", '{"a": 1, "b": [2, "}"]}')
    assert call.id.startswith("call_")
    (output,) = unary.outputs
    (same,) = output.message.tool_calls
    assert (output.message.reasoning, output.message.parts[0].text.strip()) == ("the dog", "I add.")
    assert (same.name, same.arguments_json) == (call.name, call.arguments_json)
    assert list(output.token_ids) == list(whole.token_ids)
    assert unary.usage.num_completion_tokens == len(output.token_ids)
    assert wrapped.outputs[0].message.parts == output.message.parts


async def test_a_cumulative_stream_repeats_all_so_far():
    engine = FakeEngine(answer(thinking(CALL)), chat_template=TEMPLATE)
    request = ask(
        tools=[ADD],
        template_options={"enable_thinking": True},
        sampling={"output_kind": sampling_pb2.OUTPUT_KIND_CUMULATIVE},
    )
    async with serving(engine) as (client, _):
        _, messages = await read(client.chat.Chat(request, timeout=WAIT_S))
    deltas = [message.delta for message in messages if message.HasField("delta")]
    last = deltas[-1]
    assert last.reasoning == "the dog"
    assert [call.arguments_json for call in last.tool_calls] == ['{"a": 1, "b": [2, "}"]}']
    assert all(last.reasoning.startswith(delta.reasoning) for delta in deltas)
    assert len(last.token_ids) == len(TOKENIZER.encode(thinking(CALL)).ids) + 1


@pytest.mark.parametrize("kind", [sampling_pb2.OUTPUT_KIND_DELTA, sampling_pb2.OUTPUT_KIND_CUMULATIVE])
async def test_a_call_that_breaks_is_marked_in_a_stream_and_content_in_a_whole_answer(kind):
    broken = '<tool_call>\n{"name": "add", "arguments": {"s": "line1\nline2"}}\n</tool_call>'
    engine = FakeEngine(answer(broken), chat_template=TEMPLATE)
    request = ask(tools=[ADD], sampling={"output_kind": kind})
    async with serving(engine) as (client, _):
        whole, messages = await read(client.chat.Chat(request, timeout=WAIT_S))
        unary = await client.chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=request), timeout=WAIT_S)
    if kind == sampling_pb2.OUTPUT_KIND_CUMULATIVE:
        whole = [message.delta for message in messages if message.HasField("delta")][-1]
    (call,) = whole.tool_calls
    assert (call.incomplete, call.arguments_json) == (True, '{"s": "line1')
    assert whole.content == '\nline2"}}\n</tool_call>'
    message = unary.outputs[0].message
    assert (message.parts[0].text, len(message.tool_calls)) == (broken, 0)


async def test_stop_strings_end_the_content_and_not_the_reasoning_unless_asked_for():
    engine = FakeEngine(answer("Question: hm</think>Answer: 4 Question: next"), chat_template=TEMPLATE)
    request = ask(template_options={"enable_thinking": True}, sampling={"stop": ["Question:"]})
    anywhere = ask(
        template_options={"enable_thinking": True}, sampling={"stop": ["Question:"]}, stop_in_all_text=True
    )
    async with serving(engine) as (client, _):
        whole, messages = await read(client.chat.Chat(request, timeout=WAIT_S))
        unary = await client.chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=request), timeout=WAIT_S)
        early, _ = await read(client.chat.Chat(anywhere, timeout=WAIT_S))
    assert (whole.reasoning, whole.content) == ("Question: hm", "Answer: 4 ")
    finished = messages[-1].finished
    assert (finished.reason, finished.stop_match.string) == (output_pb2.FINISH_REASON_STOP, "Question:")
    (output,) = unary.outputs
    assert (output.message.reasoning, output.message.parts[0].text) == ("Question: hm", "Answer: 4 ")
    assert output.stop_match.string == "Question:"
    assert (early.reasoning, early.content) == ("", "")


@pytest.mark.parametrize(
    ("choice", "suffix"),
    [
        ({"name": "add"}, '<tool_call>\n{"name": "add", "arguments": '),
        ({"mode": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED}, '<tool_call>\n{"name": "'),
    ],
)
async def test_a_call_that_is_demanded_is_opened_for_the_model(choice, suffix):
    rest = CALL.removeprefix(suffix)
    engine = FakeEngine(answer(rest), chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(ask(tools=[ADD], tool_choice=choice), timeout=WAIT_S))
    assert prompt_of(engine.requests[0]).endswith("[assistant] " + suffix)
    (call,) = whole.tool_calls
    assert (call.name, call.arguments_json, whole.content) == ("add", '{"a": 1, "b": [2, "}"]}', "")


def tool(name: str = "add", *, strict: bool = True, **schema) -> chat_message_pb2.Tool:
    text = json.dumps({"type": "object", **schema})
    return chat_message_pb2.Tool(name=name, parameters_json_schema=text, strict=strict)


def with_grammars(script: Script | None = None) -> FakeEngine:
    return FakeEngine(script, chat_template=TEMPLATE, structured_output_backends=["llguidance"])


def form_of(request: FakeRequest) -> dict:
    return json.loads(request.entry.sampling.structured_output.structural_tag)["format"]


NUMBER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_calls_of_strict_tools_are_held_to_their_schemas_wherever_they_stand():
    engine = with_grammars(answer("I add. " + CALL))
    request = ask(tools=[tool(**NUMBER), tool("sub", strict=False)])
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
        await read(client.chat.Chat(ask(tools=[ADD]), timeout=WAIT_S))
    form = form_of(engine.requests[0])
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["begin"] for tag in form["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("add", "sub")
    ]
    assert {tag["end"] for tag in form["tags"]} == {"}\n</tool_call>"}
    assert form["tags"][0]["content"]["json_schema"]["required"] == ["a"]
    assert not form["stop_after_first"]
    assert [tag["content"].get("lenient") for tag in form["tags"]] == [None, True]
    assert [call.name for call in whole.tool_calls] == ["add"]
    assert not engine.requests[1].entry.sampling.HasField("structured_output")


@pytest.mark.parametrize(
    ("fields", "names", "is_one"),
    [
        ({"tool_choice": {"name": "add"}}, ["add"], True),
        ({"tool_choice": {"mode": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED}}, ["add", "sub"], False),
        (
            {
                "tool_choice": {"mode": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED},
                "parallel_tool_calls": False,
            },
            ["add", "sub"],
            True,
        ),
    ],
)
async def test_an_answer_that_must_be_calls_is_nothing_else_behind_the_reasoning(fields, names, is_one):
    engine = with_grammars(answer(CALL))
    thinks = {"enable_thinking": True}
    request = ask(tools=[tool(strict=False), tool("sub")], template_options=thinks, **fields)
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
    form = form_of(engine.requests[0])
    assert (form["type"], form["separator"], form["at_least_one"]) == ("tags_with_separator", "\n", True)
    assert form["stop_after_first"] is is_one
    assert [tag["begin"].split('"')[3] for tag in form["tags"]] == names
    assert prompt_of(engine.requests[0]).endswith("[assistant] <think>\n\n</think>\n\n")
    assert not engine.requests[0].entry.sampling.structured_output.start
    assert [call.name for call in whole.tool_calls] == ["add"]


async def test_a_schema_that_the_engine_refuses_is_the_status_of_the_call_with_the_field_of_the_client():
    """And no other engine is asked."""
    engines = [
        FakeEngine(
            refusing("no backend enforces it", "CONSTRAINT_NOT_ENFORCED"),
            dp_rank=rank,
            chat_template=TEMPLATE,
            structured_output_backends=["llguidance"],
        )
        for rank in range(2)
    ]
    strict, own = ask(tools=[tool()]), ask(sampling={"structured_output": {"json_schema": "{}"}})
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        for request, field in ((strict, "tools"), (own, "sampling.structured_output")):
            for call in (read(client.chat.Chat(request, timeout=WAIT_S)), client.chat.ChatOnce(request)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details() == "no backend enforces it"
                details = details_of(caught.value)
                assert f'field: "{field}"' in details and "CONSTRAINT_NOT_ENFORCED" in details
    assert sum(len(engine.requests) for engine in engines) == 4


@pytest.mark.parametrize(
    ("backends", "options", "words"),
    [
        ([], {}, "have no grammar backend"),
        (["llguidance"], {"tool_parser": "none"}, "start with --tool-parser"),
    ],
)
async def test_a_strict_tool_is_refused_by_name_where_no_grammar_is_known(backends, options, words):
    engine = FakeEngine(answer("x"), chat_template=TEMPLATE, structured_output_backends=backends)
    none = {"mode": chat_message_pb2.TOOL_CHOICE_MODE_NONE}
    async with serving(engine, **options) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(ask(tools=[tool()]), timeout=WAIT_S))
        await read(client.chat.Chat(ask(tools=[tool()], tool_choice=none), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "tools[0].strict" in (caught.value.details() or "")
    assert words in (caught.value.details() or "")


async def test_a_demanded_call_of_a_model_without_a_tool_parser_is_an_object_that_a_grammar_makes():
    call = '{"name": "add", "parameters": {"a": 1}}'
    engine = FakeEngine(
        answer(call),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        structured_output_backends=["llguidance"],
    )
    required = {"mode": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED}
    async with serving(engine) as (client, _):
        for choice in (required, {"name": "add"}):
            request = ask(tools=[tool(strict=choice == required, **NUMBER)], tool_choice=choice)
            whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
            (found,) = whole.tool_calls
            assert (found.name, found.arguments_json, whole.content) == ("add", '{"a": 1}', "")
            form = form_of(engine.requests[-1])
            assert [tag["begin"] for tag in form["tags"]] == ['{"name": "add", "parameters": ']
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(ask(tools=[tool(strict=False)]), timeout=WAIT_S))
        assert "does not show the tool" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("parser", "schema", "kinds", "text"),
    [
        ("pythonic", False, ["tags_with_separator", "regex"], None),
        ("pythonic", True, ["tags_with_separator", "json_schema"], None),
        ("gpt_oss", False, ["tags_with_separator", "tag"], "regex"),
        ("gpt_oss", True, ["tags_with_separator", "tag"], "json_schema"),
    ],
)
async def test_calls_that_no_trigger_separates_from_text_are_all_of_an_answer(parser, schema, kinds, text):
    sampling = {"structured_output": {"json_schema": json.dumps(NUMBER)}} if schema else {}
    engine = with_grammars(answer("x"))
    async with serving(engine, tool_parser=parser) as (client, _):
        await read(client.chat.Chat(ask(tools=[tool()], sampling=sampling), timeout=WAIT_S))
    form = form_of(engine.requests[0])
    calls, other = form["elements"]
    assert [calls["type"], other["type"]] == kinds
    assert text is None or other["content"]["type"] == text
    assert ("preface" in form) == (parser == "gpt_oss")


@pytest.mark.parametrize("is_strict", [True, False])
async def test_a_structured_answer_is_calls_or_a_text_of_the_schema(is_strict):
    sampling = {"structured_output": {"json_schema": json.dumps(NUMBER), "lenient": True}}
    engine, none = with_grammars(answer(CALL)), {"mode": chat_message_pb2.TOOL_CHOICE_MODE_NONE}
    request = ask(tools=[tool(strict=is_strict)], sampling=sampling)
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
        hidden = ask(tools=[tool(strict=is_strict)], sampling=sampling, tool_choice=none)
        await read(client.chat.Chat(hidden, timeout=WAIT_S))
    form = form_of(engine.requests[0])
    calls, text = form["elements"]
    assert (form["type"], calls["type"], calls["at_least_one"]) == ("or", "tags_with_separator", True)
    assert calls["tags"][0]["content"].get("lenient") is (None if is_strict else True)
    assert text == {"type": "json_schema", "json_schema": NUMBER, "lenient": True}
    assert not engine.requests[0].entry.sampling.structured_output.lenient
    assert [call.name for call in whole.tool_calls] == ["add"]
    alone = engine.requests[1].entry.sampling.structured_output
    assert (alone.json_schema, alone.lenient) == (json.dumps(NUMBER), True)


async def test_a_schema_has_no_effect_on_a_call_that_is_demanded():
    engine = with_grammars(answer(CALL))
    sampling = {"structured_output": {"json_object": True}}
    async with serving(engine) as (client, _):
        asked = ask(tools=[tool()], tool_choice={"name": "add"}, sampling=sampling)
        await read(client.chat.Chat(asked, timeout=WAIT_S))
    assert form_of(engine.requests[0])["type"] == "tags_with_separator"


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"regex": "a"}, "structured_output is 'regex', must be json_schema or json_object where"),
        ({"json_schema": "{"}, "structured_output.json_schema is '{', must be JSON"),
    ],
)
async def test_a_constraint_that_stands_beside_no_call_is_refused(structured, words):
    engine = with_grammars()
    async with serving(engine) as (client, _):
        request = ask(tools=[tool()], sampling={"structured_output": structured})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(request, timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")


@pytest.mark.parametrize("thinks", [True, False])
async def test_124_a_structured_answer_begins_behind_a_reasoning_that_the_prompt_opens(thinks):
    engine = with_grammars(answer(thinking("{}") if thinks else "{}"))
    request = ask(
        template_options={"enable_thinking": thinks}, sampling={"structured_output": {"json_object": True}}
    )
    async with serving(engine) as (client, _):
        whole, _ = await read(client.chat.Chat(request, timeout=WAIT_S))
    entry = engine.requests[0].entry
    after = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
    assert entry.sampling.structured_output.start == (after if thinks else 0)
    assert (entry.HasField("reasoning_ended"), entry.reasoning_ended) == (thinks, False)
    expected = TOKENIZER.encode("</think>").ids if thinks else []
    assert list(entry.reasoning_options.end_token_ids) == expected
    assert whole.content == "{}"


async def test_a_structured_answer_that_ends_by_length_is_marked():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode("{").ids}, finished={request: AT_LENGTH})

    engine = with_grammars(script)
    limited = ask(sampling={"max_tokens": 1, "structured_output": {"json_object": True}})
    async with serving(engine) as (client, _):
        _, messages = await read(client.chat.Chat(limited, timeout=WAIT_S))
        unary = await client.chat.ChatOnce(limited, timeout=WAIT_S)
        free = await client.chat.ChatOnce(ask(sampling={"max_tokens": 1}), timeout=WAIT_S)
    assert messages[-1].finished.is_incomplete
    assert unary.outputs[0].is_incomplete
    assert not free.outputs[0].is_incomplete


async def test_without_tools_or_with_none_chosen_a_call_is_text():
    engine = FakeEngine(answer(CALL), chat_template=TEMPLATE)
    none = {"mode": chat_message_pb2.TOOL_CHOICE_MODE_NONE}
    async with serving(engine) as (client, _):
        for fields in ({}, {"tools": [ADD], "tool_choice": none}):
            whole, _ = await read(client.chat.Chat(ask(**fields), timeout=WAIT_S))
            assert (whole.content, len(whole.tool_calls)) == (CALL, 0)
    assert "add" not in prompt_of(engine.requests[1])


async def test_each_of_two_answers_is_read_by_a_parser_of_its_own():
    engine = FakeEngine(chat_template=TEMPLATE)
    request = ask(tools=[ADD], sampling={"n": 2, "temperature": 1.0})
    texts = (CALL, "a mat")
    async with serving(engine) as (client, _):
        call = client.chat.Chat(request, timeout=WAIT_S)
        requests = await engine.wait_for_requests(2)
        ids = [TOKENIZER.encode(text).ids for text in texts]
        for position in range(max(map(len, ids))):
            engine.step({one: ids[row][position : position + 1] for row, one in enumerate(requests)})
        engine.step({one: [EOS_ID] for one in requests}, finished=dict.fromkeys(requests, AT_EOS))
        deltas: list[list[chat_message_pb2.ChatDelta]] = [[], []]
        async for response in call:
            if response.HasField("delta"):
                deltas[response.delta.output_index].append(response.delta)
    assert "".join(piece.arguments_json for delta in deltas[0] for piece in delta.tool_calls) == (
        '{"a": 1, "b": [2, "}"]}'
    )
    assert "".join(delta.content for delta in deltas[1]) == "a mat"


async def test_a_cancelled_chat_is_aborted():
    engine = FakeEngine(chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        call = client.chat.Chat(ask(), timeout=WAIT_S)
        (request,) = await engine.wait_for_requests(1)
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)


BAD: Sequence[tuple[dict, str]] = (
    ({"messages": []}, "messages has 0"),
    # What dynamic loaders make of a role of OpenAI's, such as "user".
    (
        {"messages": [chat_message_pb2.ChatMessage(parts=USER.parts)]},
        "messages[0].role is 0, must be one of CHAT_ROLE_SYSTEM, CHAT_ROLE_DEVELOPER, CHAT_ROLE_USER,"
        " CHAT_ROLE_ASSISTANT, CHAT_ROLE_TOOL",
    ),
    (
        {"messages": [chat_message_pb2.ChatMessage(role=USER.role, parts=[chat_message_pb2.ChatPart()])]},
        "messages[0].parts[0] is not set, must be one of text, media",
    ),
    ({"tool_choice": {"mode": 9}}, "tool_choice.mode is 9, must be one of TOOL_CHOICE_MODE_UNSPECIFIED"),
    ({"messages": [chat_message_pb2.ChatMessage(role=USER.role)]}, r"messages[0].parts"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [ADD], "tool_choice": {"name": "sub"}}, "tool_choice.name"),
    ({"template_options": {"chat_template": "x"}}, "template_options.chat_template"),
    ({"template_options": {"arguments_json": "[]"}}, "template_options.arguments_json"),
    (
        {"template_options": {"continue_final_message": True, "add_generation_prompt": True}},
        "template_options.add_generation_prompt",
    ),
    (
        {
            "messages": [USER, {"role": "CHAT_ROLE_ASSISTANT", "tool_calls": [{"name": "add"}]}],
            "template_options": {"continue_final_message": True},
        },
        "template_options.continue_final_message",
    ),
    (
        {
            "messages": [
                USER,
                {"role": "CHAT_ROLE_ASSISTANT", "parts": [{"text": "x"}], "tool_calls": [{"name": "add"}]},
            ],
            "template_options": {"continue_final_message": True},
        },
        "template_options.continue_final_message",
    ),
    (
        {
            "messages": [USER, {"role": "CHAT_ROLE_ASSISTANT", "reasoning": "hm"}],
            "template_options": {"continue_final_message": True},
        },
        "template_options.continue_final_message",
    ),
    (
        {
            "messages": [
                USER,
                {"role": "CHAT_ROLE_ASSISTANT", "tool_calls": [{"name": "add", "incomplete": True}]},
            ]
        },
        "messages[1].tool_calls[0].incomplete",
    ),
)


@pytest.mark.parametrize(("fields", "shown"), BAD)
async def test_bad_conversations_are_refused_by_field(fields, shown):
    engine = FakeEngine(chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(ask(**fields), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert shown in (caught.value.details() or "")
    assert "BadRequest" in details_of(caught.value)
    assert not engine.requests


async def test_tools_that_the_model_would_not_see_are_refused_unless_none_is_chosen():
    engine = FakeEngine(answer("x"), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    none = {"mode": chat_message_pb2.TOOL_CHOICE_MODE_NONE}
    called = {"role": "CHAT_ROLE_ASSISTANT", "tool_calls": [{"name": "add"}]}
    async with serving(engine) as (client, _):
        for fields, field in (
            ({"tools": [ADD]}, "tools"),
            ({"tools": [ADD], "tool_choice": {"mode": chat_message_pb2.TOOL_CHOICE_MODE_AUTO}}, "tools"),
            ({"messages": [USER, called]}, "messages[1].tool_calls"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(client.chat.Chat(ask(**fields), timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f'field: "{field}"' in details_of(caught.value)
        assert not engine.requests
        whole, _ = await read(client.chat.Chat(ask(tools=[ADD], tool_choice=none), timeout=WAIT_S))
    assert whole.content == "x"


async def test_a_template_of_the_client_is_used_where_the_server_allows_it():
    engine = FakeEngine(answer("x"), chat_template=TEMPLATE)
    request = ask(template_options={"chat_template": "Q: {{ messages[0].content }}"})
    async with serving(engine, request_templates=True) as (client, _):
        await read(client.chat.Chat(request, timeout=WAIT_S))
    assert prompt_of(engine.requests[0]) == "Q: the cat"


async def test_a_call_cannot_be_demanded_where_no_parser_is_known():
    engine = FakeEngine(chat_template="{{ messages[0].content }}")
    async with serving(engine) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(ask(tools=[ADD], tool_choice={"name": "add"}), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "tool_choice" in (caught.value.details() or "")


async def test_the_tokenizers_files_come_whole():
    engine = FakeEngine(chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        files: dict[str, bytes] = {}
        async for response in client.tokenizer.GetTokenizer(tokenizer_pb2.GetTokenizerRequest()):
            assert response.offset == len(files.get(response.file_name, b""))
            files[response.file_name] = files.get(response.file_name, b"") + response.chunk
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert files["tokenizer.json"] == TOKENIZER.to_str().encode()


async def test_127_a_thinking_budget_goes_to_the_engine_with_the_models_markers():
    engine = FakeEngine(answer("x"), chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        for budget in (5, -1):
            await read(client.chat.Chat(ask(sampling={"thinking_token_budget": budget}), timeout=WAIT_S))
    limited, free = (request.entry for request in engine.requests)
    markers = limited.reasoning_options
    assert limited.sampling.thinking_token_budget == 5
    assert list(markers.start_token_ids) == TOKENIZER.encode("<think>").ids
    assert list(markers.end_token_ids) == TOKENIZER.encode("</think>").ids
    assert not free.sampling.HasField("thinking_token_budget")
    assert not free.HasField("reasoning_options")


async def test_127_a_thinking_budget_needs_a_model_whose_reasoning_is_known():
    engine = FakeEngine(chat_template="{{ messages[0].content }}")
    async with serving(engine) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.chat.Chat(ask(sampling={"thinking_token_budget": 5}), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "thinking_token_budget" in (caught.value.details() or "")
