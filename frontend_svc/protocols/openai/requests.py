"""Translates bodies into requests. What values may be is checked where requests of every protocol are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from frontend_svc.protocols.openai.bodies import (
    SAME_SAMPLING,
    Base,
    CalledTool,
    ChatBody,
    CompletionBody,
    Function,
    IgnoredFields,
    Message,
    NamedTool,
    SamplingBody,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
    Tool,
    is_misspelt,
    json_text,
    read_part,
    text_of,
)
from frontend_svc.protocols.openai.field_names import FieldNames
from triptych.api.v1 import chat_message_pb2, generate_pb2, tokenizer_pb2
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

# OpenAI's default for completions; a chat message has no such limit.
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 128
_FUNCTION = "function"
_SEED_MASK = (1 << 64) - 1
# Of structured outputs, beside the constraint.
_STRUCTURED_OPTIONS = (
    "any_whitespace", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
    "lenient", "backend",
)  # fmt: skip

_STARTS = {
    "at_once": sampling_pb2.STRUCTURED_OUTPUT_START_AT_ONCE,
    "after_reasoning": sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING,
    "after_opened_reasoning": sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_OPENED_REASONING,
}
_OF_REQUEST = (
    "model", "priority", "cache_salt", "request_id", "truncate_prompt_tokens", "job_id", "is_last_step",
)  # fmt: skip
_MODES = {
    "none": chat_message_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": chat_message_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
# Fields of a chat that its body has in other places.
_CHAT_NAMES = {
    "messages[].tool_calls[].name": "messages[].tool_calls[].function.name",
    "messages[].tool_calls[].arguments_json": "messages[].tool_calls[].function.arguments",
    "tools[]": "tools[].function",
    "tools[].parameters_json_schema": "tools[].function.parameters",
    "tool_choice.name": "tool_choice.function.name",
    "template_options.arguments_json": "chat_template_kwargs",
    "template_options.enable_thinking": "chat_template_kwargs.enable_thinking",
}
_CHAT_WHOLES = {"messages[].parts": "messages[].content", "tool_choice.mode": "tool_choice"}


class Streamable(Protocol):
    @property
    def stream(self) -> bool | None: ...

    @property
    def stream_options(self) -> StreamOptions | None: ...


def completion_names() -> FieldNames:
    """Names of a completion's fields, before its translation adds its own."""
    return FieldNames()


def chat_names() -> FieldNames:
    """Names of a chat's fields, before its translation adds its own."""
    return FieldNames(_CHAT_NAMES, _CHAT_WHOLES)


def generate_requests(body: CompletionBody, names: FieldNames) -> list[generate_pb2.GenerateRequest]:
    """A request for each prompt of the body. The body's fields are added to `names`."""
    sampling = _sampling(body, names)
    if body.max_tokens is None:
        sampling.max_tokens = _DEFAULT_COMPLETION_TOKENS
    set_field(sampling, "logprobs", body.logprobs)
    if body.echo:
        _fill_echo(sampling, body, names)
    requests = []
    for field, prompt in _prompts(body.prompt):
        request = generate_pb2.GenerateRequest(sampling=sampling)
        _fill_request(request, body)
        set_field(request, "add_special_tokens", body.add_special_tokens)
        set_field(request, "orphan_grace_ms", body.orphan_grace_ms)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.SetInParent()
            _checked(field, prompt, request.token_ids.ids.extend)
        requests.append(request)
    if len(requests) > 1 and body.request_id is not None:
        raise InvalidArgument(
            "request_id names one request, and there are several prompts", field="request_id"
        )
    return requests


def _fill_echo(sampling: sampling_pb2.SamplingParams, body: CompletionBody, names: FieldNames) -> None:
    """Log probabilities of the prompt have its tokens, too, which is the text of a prompt of ids."""
    if body.orphan_grace_ms:
        raise InvalidArgument("orphan_grace_ms does not go with echo", field="orphan_grace_ms")
    if body.prompt_logprobs is None:
        set_field(sampling, "prompt_logprobs", body.logprobs or 0, "logprobs", names)
    if body.max_tokens == 0:
        # An engine generates a token at least; it is left out of the answer.
        sampling.max_tokens = 1


def chat_request(body: ChatBody, ignored: IgnoredFields, names: FieldNames) -> chat_message_pb2.ChatRequest:
    """The request of a body, whose fields are added to `names`.

    Names of tools that are left out are added to `ignored`.
    """
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        ignored.append("max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs to be true", field="top_logprobs")
    request = chat_message_pb2.ChatRequest(
        sampling=_sampling(body, names),
        messages=[message_of(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        tools=tools_of(body.tools, ignored),
    )
    for index, (at, _) in enumerate(served_tools(body.tools)):
        names.note(f"tools[{index}]", f"{at}.function")
        names.note(f"tools[{index}].parameters_json_schema", f"{at}.function.parameters")
    _fill_request(request, body)
    limit, num_top = body.max_completion_tokens, body.top_logprobs
    set_field(request.sampling, "max_tokens", limit, "max_completion_tokens", names)
    if body.logprobs:
        set_field(request.sampling, "logprobs", num_top or 0, "top_logprobs", names)
    if isinstance(body.tool_choice, dict):
        check_choice(body.tool_choice)
        named = read_part(body.tool_choice, NamedTool, ignored, "tool_choice")
        request.tool_choice.name = named.function.name
    elif body.tool_choice is not None:
        check_demand(body.tools, body.tool_choice)
        request.tool_choice.mode = _MODES[body.tool_choice]
    set_field(request, "parallel_tool_calls", body.parallel_tool_calls)
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
        if len(arguments) == 1:
            names.note("template_options.arguments_json", "reasoning_effort")
    _fill_template(request.template_options, body, arguments)
    return request


def template_request(body: TokenizeBody, ignored: IgnoredFields) -> tokenizer_pb2.ApplyChatTemplateRequest:
    """The request for the prompt of a body's messages."""
    messages = body.messages or ()
    request = tokenizer_pb2.ApplyChatTemplateRequest(
        model=body.model,
        messages=[message_of(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools=tools_of(body.tools, ignored),
    )
    _fill_template(request.template_options, body, dict(body.chat_template_kwargs or {}))
    return request


def _fill_template(
    options: chat_message_pb2.ChatTemplateOptions, body: ChatBody | TokenizeBody, arguments: dict[str, Any]
) -> None:
    for name in ("chat_template", "add_generation_prompt", "continue_final_message"):
        set_field(options, name, getattr(body, name))
    if isinstance(thinks := arguments.pop("enable_thinking", None), bool):
        options.enable_thinking = thinks
    if arguments:
        options.arguments_json = json.dumps(arguments)


def note_unstreamed(body: Streamable, ignored: list[str]) -> None:
    """Add the options of a stream to `ignored` for an answer that is none."""
    if not body.stream and body.stream_options is not None:
        ignored.append("stream_options")


def message_of(message: Message, field: str) -> chat_message_pb2.ChatMessage:
    content = message.content
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [text_of(part, f"{field}.content[{index}]") for index, part in enumerate(content or ())]
    if message.refusal:
        texts.append(message.refusal)
    return chat_message_pb2.ChatMessage(
        role=f"CHAT_ROLE_{message.role.upper()}",
        parts=[chat_message_pb2.ChatPart(text=text) for text in texts],
        name=message.name or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=[_call_of(call, index) for index, call in enumerate(message.tool_calls or ())],
        tool_call_id=message.tool_call_id or "",
    )


def tools_of(
    raw_tools: Sequence[Mapping[str, Any]] | None, ignored: IgnoredFields
) -> list[chat_message_pb2.Tool]:
    """The functions among the tools. Names of the other tools are added to `ignored`."""
    return [
        _tool_of(read_part(raw, Tool, ignored, at).function) for at, raw in served_tools(raw_tools, ignored)
    ]


def served_tools(
    raw_tools: Sequence[Mapping[str, Any]] | None, ignored: IgnoredFields | None = None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Each function among the tools with its field; names of the other tools are added to `ignored`."""
    served = []
    for index, raw in enumerate(raw_tools or ()):
        at, kind = f"tools[{index}]", raw.get("type", _FUNCTION)
        if not isinstance(kind, str) or kind == _FUNCTION or is_misspelt(kind, (_FUNCTION,)):
            served.append((at, raw))
        elif ignored is not None:
            ignored.append(at)
    return served


def check_choice(choice: Mapping[str, Any]) -> None:
    """Raises Unimplemented for a choice of a tool that is no function."""
    kind = choice.get("type", _FUNCTION)
    if isinstance(kind, str) and kind != _FUNCTION:
        raise Unimplemented(
            f"tool_choice.type is {kind!r:.60}, which is not served: a tool that is called is a function",
            metadata={"field": "tool_choice.type"},
        )


def check_demand(raw_tools: Sequence[Mapping[str, Any]] | None, choice: str) -> None:
    """Raises Unimplemented if a call is demanded and no tool is a function."""
    if choice == "required" and raw_tools and not served_tools(raw_tools):
        kind = raw_tools[0]["type"]
        raise Unimplemented(
            f"tools[0].type is {kind!r:.60}, which is not served, and tool_choice demands a call",
            metadata={"field": "tools[0].type"},
        )


def _tool_of(function: Function) -> chat_message_pb2.Tool:
    return chat_message_pb2.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json_schema="" if function.parameters is None else json_text(function.parameters),
        strict=bool(function.strict),
    )


def _call_of(call: CalledTool, index: int) -> chat_message_pb2.ToolCall:
    return chat_message_pb2.ToolCall(
        index=index,
        id=call.id,
        name=call.function.name,
        arguments_json=call.function.arguments,
        incomplete=call.incomplete,
    )


def _sampling(body: SamplingBody, names: FieldNames) -> sampling_pb2.SamplingParams:
    if body.best_of not in (None, body.n or 1):
        raise Unimplemented(
            f"best_of is {body.best_of}, must be n: outputs are not chosen among more of them",
            metadata={"field": "best_of"},
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs is not served with stream", field="prompt_logprobs")
    sampling = sampling_pb2.SamplingParams()
    for name in (*SAME_SAMPLING, "max_tokens", "n", "prompt_logprobs"):
        set_field(sampling, name, getattr(body, name))
    with_stop = body.include_stop_str_in_output
    set_field(sampling, "include_stop_in_output", with_stop, "include_stop_str_in_output", names)
    if body.seed is not None:
        if not -(1 << 63) <= body.seed <= _SEED_MASK:
            raise InvalidArgument(f"seed is {body.seed}, must have 64 bits", field="seed")
        sampling.seed = body.seed & _SEED_MASK
    if body.stop is not None:
        set_field(sampling, "stop", [body.stop] if isinstance(body.stop, str) else body.stop)
    for index, (token, bias) in enumerate((body.logit_bias or {}).items()):
        field = f"logit_bias.{token}"
        if not token.isdecimal():
            raise InvalidArgument(f"{field} is no token id", field=field)
        entry = sampling.logit_bias.add()
        set_field(entry, "token_id", int(token), field)
        set_field(entry, "bias", bias, field)
        names.note_whole(f"sampling.logit_bias[{index}]", field)
    _fill_structured(sampling, body, names)
    return sampling


def _fill_structured(sampling: sampling_pb2.SamplingParams, body: SamplingBody, names: FieldNames) -> None:
    """The one constraint of the body, by whichever of the names it has."""
    given = body.structured_outputs or StructuredOutputs()
    named: list[tuple[str, Any]] = [
        ("response_format", _response_format(body)),
        ("structured_outputs.json", given.json),
        ("structured_outputs.regex", given.regex),
        ("structured_outputs.choice", given.choice),
        ("structured_outputs.grammar", given.grammar),
        ("structured_outputs.json_object", given.json_object),
        ("structured_outputs.structural_tag", given.structural_tag),
        ("guided_json", body.guided_json),
        ("guided_regex", body.guided_regex),
        ("guided_choice", body.guided_choice),
        ("guided_grammar", body.guided_grammar),
    ]
    found = [(field, value) for field, value in named if value is not None and value is not False]
    if len(found) > 1:
        fields = ", ".join(field for field, _ in found)
        raise InvalidArgument(f"an output has one constraint, and {fields} are given", field=found[1][0])
    if not found:
        return
    (field, value) = found[0]
    structured, kind = sampling.structured_output, field.rpartition(".")[2].removeprefix("guided_")
    if value is True:
        structured.json_object = True
    elif kind in ("json", "response_format"):
        structured.json_schema = value if isinstance(value, str) else json_text(value)
    elif kind == "choice":
        structured.choice.choices.extend(value)
    else:
        setattr(structured, kind, value)
    names.note_whole("sampling.structured_output", field)
    if kind == "response_format" and value is not True:
        path = "sampling.structured_output.json_schema"
        names.note_whole(path, "response_format.json_schema.schema")
    for option in _STRUCTURED_OPTIONS:
        field = f"structured_outputs.{option}"
        set_field(structured, option, getattr(given, option), field)
        names.note(f"sampling.structured_output.{option}", field)
    if given.start is not None:
        structured.start = _STARTS[given.start]
        names.note("sampling.structured_output.start", "structured_outputs.start")
    if body.guided_whitespace_pattern is not None:
        structured.whitespace_pattern = body.guided_whitespace_pattern
        names.note("sampling.structured_output.whitespace_pattern", "guided_whitespace_pattern")


def _response_format(body: SamplingBody) -> dict[str, Any] | bool | None:
    """A schema, True for any object, None for any text."""
    chosen = body.response_format
    if chosen is None or chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return True
    if chosen.json_schema is None or chosen.json_schema.schema is None:
        field = "response_format.json_schema.schema"
        raise InvalidArgument(f"{field} is missing", field=field)
    return chosen.json_schema.schema


def _fill_request(
    request: generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest, body: SamplingBody
) -> None:
    for name in _OF_REQUEST:
        set_field(request, name, getattr(body, name))
    request.return_prompt_token_ids = bool(body.return_token_ids)


def prompt_fields(body: CompletionBody) -> list[str]:
    """Where each prompt of the body is."""
    return [field for field, _ in _prompts(body.prompt)]


def _prompts(given: str | list[Any]) -> list[tuple[str, str | list[int]]]:
    """Each prompt with its place in the body."""
    if isinstance(given, str) or set(map(type, given)) == {int}:
        return [("prompt", given)]
    if not 1 <= len(given) <= _MAX_PROMPTS:
        raise InvalidArgument(f"prompt has {len(given)} entries, must be 1..{_MAX_PROMPTS}", field="prompt")
    for index, each in enumerate(given):
        is_ids = isinstance(each, list) and set(map(type, each)) <= {int}
        if not isinstance(each, str) and not is_ids:
            field = f"prompt[{index}]"
            raise InvalidArgument(f"{field} is neither a text nor a list of token ids", field=field)
    return [(f"prompt[{index}]", each) for index, each in enumerate(given)]


def set_field(message: Any, name: str, value: Any, field: str = "", names: FieldNames | None = None) -> None:
    """Set a field of a protobuf message if there is a value; `field` is its name in the body.

    A name of the body's own is added to `names`.
    """
    if value is None:
        return
    if names is not None:
        names.note_set(message, name, field or name)
    if isinstance(value, Base):
        for inner in value.__struct_fields__:
            set_field(getattr(message, name), inner, getattr(value, inner), f"{field or name}.{inner}")
        return

    def put(value: Any) -> None:
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    _checked(field or name, value, put)


def _checked(field: str, value: Any, put: Callable[[Any], object]) -> None:
    try:
        put(value)
    except (ValueError, TypeError) as error:
        shown = f"{value!r:.60}" if not isinstance(value, Sequence) or isinstance(value, str) else "a list"
        raise InvalidArgument(f"{field} is {shown}, which is out of range", field=field) from error
