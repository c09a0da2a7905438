"""Chat templates render as Hugging Face's tokenizers render them, within a sandbox."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from frontend_svc.text.chat.conversation import check_conversation
from frontend_svc.text.chat.template import (
    CHATML_FALLBACK,
    MAX_TEMPLATE_CHARS,
    PLAIN_FALLBACK,
    ChatTemplate,
    read_special_tokens,
    read_templates,
)
from frontend_svc.text.limits import Violations
from frontend_svc.text.tokenize.text_files import TextRefused
from tests.frontend_svc.tokenizers import byte_level_tokenizer
from triptych.api.v1 import chat_message_pb2
from triptych_kit.errors import InvalidArgument

# Templates in the formats of model families in use, written for these tests.
BY_FAMILY = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
WITH_TOOLS = [family for family, source in BY_FAMILY.items() if "tools" in source]
WITH_CALLS = [family for family in BY_FAMILY if family not in ("gemma", "zephyr")]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather & more: <b>très</b> 'bien' 日本",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
ASKED = [{"role": "user", "content": "  What's up, 世界? <>&\n"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Not much. "}]
LONGER = [{"role": "system", "content": "Be brief."}, *ANSWERED, {"role": "user", "content": "And now?"}]
ARGUMENTS = {"city": "Zürich", "days": [1, 2]}
CALLED = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "They want the weather.",
        "tool_calls": [
            {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "content": '{"t": 5}', "tool_call_id": "call12345", "name": "weather"},
]
THOUGHT = [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"}]
CONVERSATIONS = {
    "one question": {"messages": ASKED, "add_generation_prompt": True},
    "answered": {"messages": ANSWERED},
    "with a system": {"messages": LONGER, "add_generation_prompt": True},
    "tools": {"messages": ASKED, "tools": [WEATHER, WEATHER], "add_generation_prompt": True},
    "a call": {"messages": CALLED, "tools": [WEATHER], "add_generation_prompt": True},
    "thought": {"messages": THOUGHT},
    "no thinking": {
        "messages": ASKED,
        "add_generation_prompt": True,
        "arguments": {"enable_thinking": False, "reasoning_effort": "high", "date_string": "1 May"},
    },
    "continued": {"messages": ANSWERED, "continue_final_message": True},
}


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special or SPECIAL)


def render(source: str, conversation: dict[str, object], *, max_chars: int = 100_000) -> str:
    return template(source).render(conversation, max_chars=max_chars)


def render_message(source: str, content: object = "hi", **more: object) -> str:
    return render(source, {"messages": [{"role": "user", "content": content}], **more})


def rendered_by_transformers(source: str, conversation: dict[str, object]) -> str | None:
    """What the library renders, or None for what it, or the template, refuses."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **SPECIAL)
    conversation = copy.deepcopy(conversation)
    try:
        rendered = tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation.get("tools"),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=conversation.get("add_generation_prompt", False),
            continue_final_message=conversation.get("continue_final_message", False),
            **conversation.get("arguments", {}),
        )
        return str(rendered)
    except (TemplateError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("family", BY_FAMILY)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_prompt_is_that_of_transformers(family, kind):
    source, conversation = BY_FAMILY[family], CONVERSATIONS[kind]
    if family == "deepseek" and kind == "a call":
        # This family's template takes the arguments of a call as text only.
        conversation = copy.deepcopy(conversation)
        call = conversation["messages"][1]["tool_calls"][0]["function"]
        call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    expected = rendered_by_transformers(source, conversation)
    # The library leaves out tools that a template does not show.
    if expected is None or ("tools" in conversation and family not in WITH_TOOLS):
        with pytest.raises(TextRefused):
            render(source, CONVERSATIONS[kind])
    else:
        assert render(source, CONVERSATIONS[kind]) == expected


@pytest.mark.parametrize("family", BY_FAMILY)
def test_every_family_is_compared_on_prompts_and_not_on_refusals_alone(family):
    prompts = [rendered_by_transformers(BY_FAMILY[family], one) for one in CONVERSATIONS.values()]
    assert sum(prompt is not None for prompt in prompts) >= 6


@pytest.mark.parametrize("family", WITH_CALLS)
def test_arguments_of_a_call_may_be_text_or_an_object(family):
    as_object = {"messages": CALLED, "add_generation_prompt": True}
    as_text = copy.deepcopy(as_object)
    function = as_text["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(ARGUMENTS, ensure_ascii=False)
    prompt = render(BY_FAMILY[family], as_text)
    assert prompt == render(BY_FAMILY[family], as_object)
    assert "Zürich" in prompt


def test_arguments_that_are_no_json_are_refused():
    conversation = copy.deepcopy(CONVERSATIONS["a call"])
    conversation["messages"][1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(TextRefused, match="arguments of a tool call of message 1 are not JSON"):
        render(BY_FAMILY["qwen-3"], conversation)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LOOPS_ALWAYS = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
LOOPS_BY_A_NAME = (
    "{% macro show(body) %}{% for part in body %}[{{ part.text }}]{% endfor %}{% endmacro %}"
    "{% set content = messages[0]['content'] %}{{ show(content) }}"
)


@pytest.mark.parametrize(
    ("source", "content", "prompt"),
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content }}", PARTS[:1], "one"),
        ("{{ messages[0].content }}", [], ""),
        (LOOPS_ALWAYS, PARTS, "[one][two]"),
        (LOOPS_ALWAYS, "one", "[one]"),
        (LOOPS_BY_A_NAME, PARTS, "[one][two]"),
        (LOOPS_BY_A_NAME, "one", "[one]"),
        (BY_FAMILY["gemma"], PARTS, "<s><start_of_turn>user\nonetwo<end_of_turn>\n"),
        (BY_FAMILY["gemma"], "one", "<s><start_of_turn>user\none<end_of_turn>\n"),
    ],
)
def test_content_comes_as_the_template_reads_it(source, content, prompt):
    assert render_message(source, content) == prompt


def test_parts_that_are_no_text_are_for_templates_that_go_through_parts():
    picture = [{"type": "image"}, *PARTS]
    assert (
        render_message(
            "{% for part in messages[0].content %}{{ part.text or part.type }} {% endfor %}", picture
        )
        == "image one two "
    )
    with pytest.raises(TextRefused, match="message 0 has more than text"):
        render_message("{{ messages[0].content }}", picture)


def test_the_last_part_of_text_is_what_is_continued():
    source = LOOPS_ALWAYS + "<end>"
    assert render_message(source, PARTS, continue_final_message=True) == "[one][two"


def test_continuing_and_opening_an_answer_exclude_each_other():
    with pytest.raises(TextRefused, match="exclude each other"):
        render_message("x", continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TextRefused, match="does not show the last message"):
        render_message("{{ messages[0].content|upper }}", continue_final_message=True)


def test_templates_have_names_and_that_for_tools_is_used_with_tools():
    text = "{{ messages[0].content }}"
    for_tools = text + "{{ tools[0].function.name }}"
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": for_tools}]
    config = {"chat_template": named}
    both = ChatTemplate(read_templates(config, ""), {})
    hi = [{"role": "user", "content": "hi"}]
    assert both.render({"messages": hi}, max_chars=99) == "hi"
    assert both.render({"messages": hi, "tools": []}, max_chars=99) == "hi"
    assert both.render({"messages": hi, "tools": [WEATHER]}, max_chars=99) == "hiweather"
    only_named = ChatTemplate(read_templates({"chat_template": {"rag": "r"}}, ""), {})
    with pytest.raises(TextRefused, match="none of the model's chat templates is the default one: rag"):
        only_named.render({"messages": ASKED}, max_chars=10)


def test_the_file_of_that_name_counts_before_the_configuration():
    assert read_templates({"chat_template": "old"}, "new") == {"default": "new"}
    assert read_templates({"chat_template": "old"}, "") == {"default": "old"}
    assert read_templates({}, "") == {}


def test_special_tokens_are_texts_or_objects():
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": None,
        "extra_special_tokens": {"image_token": "<image>"},
    }
    assert read_special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}


def test_a_client_s_own_template_is_used_instead_of_the_model_s():
    assert render_message("mine", chat_template="{{ messages[0].content }}") == "hi"


def test_arguments_reach_the_template_but_do_not_change_the_conversation():
    source = "{{ colour }} {{ messages[0].content }}"
    assert render_message(source, arguments={"colour": "red"}) == "red hi"
    with pytest.raises(TextRefused, match="must not be named messages"):
        render_message(source, arguments={"messages": []})


@pytest.mark.parametrize(
    ("condition", "role"),
    [("", "system"), ("{% if messages[0].role == 'developer' %}{% endif %}", "developer")],
)
def test_a_developer_is_the_system_where_the_template_does_not_name_the_role(condition, role):
    messages = [{"role": "developer", "content": "Be brief."}]
    source = "{{ messages[0].role }}: {{ messages[0].content }}" + condition
    assert render(source, {"messages": messages}) == f"{role}: Be brief."


def test_chatml_without_a_template():
    conversation = {"messages": LONGER[:2], "add_generation_prompt": True}
    assert render(CHATML_FALLBACK, conversation) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n  What's up, 世界? <>&\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_lines_without_a_template():
    conversation = {"messages": LONGER, "add_generation_prompt": True}
    assert render(PLAIN_FALLBACK, conversation) == (
        "<s>system: Be brief.\nuser:   What's up, 世界? <>&\n\n"
        "assistant: Not much. \nuser: And now?\nassistant:"
    )
    assert (
        template(PLAIN_FALLBACK, x="").render({"messages": ANSWERED[1:]}, max_chars=99)
        == "assistant: Not much. \n"
    )
    continued = {"messages": ANSWERED[1:], "continue_final_message": True}
    assert render(PLAIN_FALLBACK, continued) == "<s>assistant: Not much. "


@pytest.mark.parametrize(
    "source",
    [
        CHATML_FALLBACK,
        PLAIN_FALLBACK,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}weather",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}You have tools.{% endif %}",
        "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}",
        "{% for tool in (tools or [])[:1] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}",
    ],
)
def test_tools_that_the_template_does_not_show_are_refused(source):
    other = {"type": "function", "function": {**WEATHER["function"], "name": "other"}}
    with pytest.raises(TextRefused, match="does not show the tool") as caught:
        render(source, {"messages": ASKED, "tools": [WEATHER, other]})
    assert caught.value.field == "tools"
    assert render(source, {"messages": ASKED, "tools": []}) is not None


@pytest.mark.parametrize("source", [CHATML_FALLBACK, PLAIN_FALLBACK, BY_FAMILY["gemma"]])
def test_calls_that_the_template_does_not_show_are_refused(source):
    with pytest.raises(TextRefused, match="does not show tool calls") as caught:
        render(source, {"messages": CALLED})
    assert caught.value.field == "messages[1].tool_calls"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ range(1000000000)|list }}",
        "{{ dict.__class__.__base__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ ''.format.__self__.x }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 1 / 0 }}",
        "{{ missing.name }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_what_leaves_the_sandbox_or_goes_wrong_is_refused(source):
    with pytest.raises(TextRefused):
        render_message(source)


def test_size_of_templates_and_of_prompts_is_limited():
    with pytest.raises(TextRefused, match=rf"must have at most {MAX_TEMPLATE_CHARS}"):
        render_message("x" * (MAX_TEMPLATE_CHARS + 1))
    source, hi = "xx{{ messages[0].content }}", {"messages": [{"role": "user", "content": "hi"}]}
    assert render(source, hi, max_chars=4) == "xxhi"
    with pytest.raises(TextRefused, match="more than 3 characters"):
        render(source, hi, max_chars=3)


def said(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content | trim }};"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }};"
    "{% elif m.role == 'assistant' %}A:{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %};{% endif %}{% endfor %}"
)
CALL_OF_F = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([said("developer", "D"), said("user", "U")], "S:D;U:U;"),
        ([said("system", "S"), said("developer", "D"), said("user", "U")], "S:S\n\nD;U:U;"),
        ([said("system", " "), said("developer", "D"), said("user", "U")], "S:D;U:U;"),
        ([said("user", "a"), said("assistant", "", tool_calls=CALL_OF_F)], "U:a;A:f;"),
        ([said("user", "a"), said("assistant", "S", tool_calls=CALL_OF_F)], "U:a;A:S;A:f;"),
    ],
)
def test_messages_that_a_template_leaves_out_are_rendered_in_a_form_that_it_shows(messages, prompt):
    assert render(FIRST_SYSTEM, {"messages": messages}) == prompt


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        # The text of each is also elsewhere in the prompt.
        ([said("user", "U"), said("system", "U")], 1),
        ([said("user", "U" * 99), said("tool", "U" * 99)], 1),
        ([said("system", "S"), said("user", "U"), said("developer", ":")], 2),
    ],
)
def test_a_message_that_a_template_cannot_show_is_refused(messages, index):
    with pytest.raises(TextRefused, match="does not show this message") as caught:
        render(FIRST_SYSTEM, {"messages": messages})
    assert caught.value.field == f"messages[{index}]"


def test_a_part_that_a_template_does_not_show_is_no_less_a_message():
    first = "{{ messages[0].content[0].text }}{% for part in messages[0].content %}{% endfor %}"
    with pytest.raises(TextRefused, match="does not show this message"):
        render_message(first, PARTS)


@pytest.mark.parametrize("text", ["  padded  ", "<think>hm</think>said", '"quoted" <&> \\n', "日本"])
def test_a_text_that_a_template_changes_is_shown(text):
    source = "{{ messages[0].content.split('</think>')[-1] | trim | tojson }}"
    assert render_message(source, text)


@pytest.mark.parametrize("messages", [None, [], ["x"], [{"role": "user", "content": 5}]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(TextRefused):
        render("{{ messages }}", {"messages": messages})


# How large a conversation may be: what there is too much of is not looked at, entry by entry.

ROLE = chat_message_pb2.CHAT_ROLE_ASSISTANT
CHARS, JSON_CHARS = 4 * 2**20, 2**19
NOTHING = chat_message_pb2.ChatMessage()


def fields_of(**fields) -> dict[str, object]:
    return {"messages": [{"role": ROLE, **fields}]}


def object_of(num_chars: int) -> str:
    return '{"a":"' + "x" * (num_chars - 8) + '"}'


def breaches(**fields) -> list[tuple[str, str]]:
    violations = Violations()
    request = chat_message_pb2.ChatRequest(**fields)
    asyncio.run(check_conversation(request, violations, takes_templates=False))
    try:
        violations.raise_if_any()
    except InvalidArgument as error:
        return error.violations
    return []


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        # Each entry would be a breach of its own.
        ({"messages": [NOTHING] * 4097}, "messages", "has 4097 messages, must have 1..4096"),
        ({"messages": [NOTHING], "tools": [{}] * 129}, "tools", "has 129 tools, must have at most 128"),
        (fields_of(parts=[{}] * 16_385), "messages", "has 16385 parts, must have at most 16384"),
        (fields_of(tool_calls=[{}] * 16_385), "messages", "has 16385 tool calls, must have at most 16384"),
        (fields_of(parts=[{"text": "x" * (CHARS + 1)}]), "messages", f"has {CHARS + 1} characters, must"),
        (fields_of(reasoning="x" * (CHARS + 1)), "messages", f"has {CHARS + 1} characters, must"),
        (
            fields_of(tool_calls=[{"arguments_json": "["}] * 2 + [{"arguments_json": "x" * 2**20}]),
            "messages",
            f"has {2**20 + 2} characters of JSON, must have at most {2**20}",
        ),
        (
            fields_of() | {"tools": [{"parameters_json_schema": "x" * JSON_CHARS}] * 2},
            "tools",
            f"has {2 * JSON_CHARS} characters of JSON, must have at most {JSON_CHARS}",
        ),
        (
            fields_of() | {"template_options": {"arguments_json": "[" * (JSON_CHARS + 1)}},
            "template_options.arguments_json",
            f"has {JSON_CHARS + 1} characters, must have at most {JSON_CHARS}",
        ),
    ],
)
def test_what_is_too_large_is_reported_once(fields, field, message):
    [(found, description)] = breaches(**fields)
    assert found == field
    assert message in description


def test_all_of_the_largest_sizes_is_fine():
    text = object_of(JSON_CHARS)
    request = fields_of(
        parts=[{"text": "x"}] * 16_384,
        tool_calls=[{"name": "a", "arguments_json": object_of(2**20)}],
        reasoning="x" * (CHARS - 2**20 - 16_384),
    )
    tools = [{"name": "a", "parameters_json_schema": text}]
    assert breaches(**request, tools=tools, template_options={"arguments_json": text}) == []
