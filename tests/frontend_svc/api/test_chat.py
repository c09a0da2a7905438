"""Chat over gRPC: prompts by the model's template, answers taken apart, calls that are demanded."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_EOS,
    EOS_ID,
    TOKENIZER,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    answer,
    details_of,
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
    ({"tools": [chat_message_pb2.Tool(name="a b")]}, "tools[0].name"),
    ({"tools": [chat_message_pb2.Tool(name="a", parameters_json_schema="{")]}, "parameters_json_schema"),
    ({"tools": [ADD], "tool_choice": {"name": "sub"}}, "tool_choice.name"),
    ({"tool_choice": {"mode": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED}}, "tool_choice.mode"),
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
