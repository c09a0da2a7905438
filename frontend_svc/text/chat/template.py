"""Renders conversations by a model's Jinja template, in a sandbox, as Hugging Face's tokenizers do.

Runs in a text worker, which bounds its time and its memory. Knows no tokens and no processes.

A model without a template gets a fallback. If the vocabulary has `<|im_start|>` and `<|im_end|>`, it is
ChatML: `<|im_start|>role`, a line break, the content, `<|im_end|>`, a line break. Otherwise it is the BOS
token, if there is one, then a line `role: content` per message, and `assistant:` to open the answer.

Tools, calls and messages that a template does not show are refused: the model would not see them. Neither
fallback shows tools and calls.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from frontend_svc.text.chat.shown_messages import Conversation, in_other_form, missing_messages
from frontend_svc.text.chat.template_facts import TemplateFacts, facts_of
from frontend_svc.text.chat.template_messages import shape_messages
from frontend_svc.text.tokenize.text_files import TextRefused

if TYPE_CHECKING:
    from jinja2.parser import Parser

MAX_TEMPLATE_CHARS = 512 * 1024
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

CHATML_FALLBACK = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content|default('') + '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
PLAIN_FALLBACK = (
    "{{- bos_token|default('') -}}{%- for message in messages -%}"
    "{{ message.role + ': ' + message.content|default('') + '\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif -%}"
)

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Set from the conversation; an argument of such a name would replace what was checked.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
# Appended to the text to be continued. Its last space shows whether the template trims its messages.
_OPEN_END = "OPEN-END-5b1c0e77 "
_MAX_COMPILED = 8
# Everything that a template's code can raise.
_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: Template
    facts: TemplateFacts


@dataclass(frozen=True, slots=True)
class _Rendering:
    """Renders messages by one template, with the other variables of a conversation."""

    template: Template
    variables: Mapping[str, Any]
    max_chars: int
    is_continued: bool  # the last message goes on

    def text_of(self, messages: list[dict[str, object]]) -> str:
        """The prompt, in which all messages are. Raises TextRefused."""
        conversation = Conversation(messages, list(range(len(messages))))
        text = self._written(messages)
        missing = missing_messages(messages, text, self._marked)
        if missing and (other := in_other_form(conversation, missing)) is not None:
            with contextlib.suppress(TextRefused):
                text = self._written(other.messages)
                missing, conversation = missing_messages(other.messages, text, self._marked), other
        if missing:
            field = f"messages[{conversation.origins[missing[0]]}]"
            raise TextRefused(f"{field}: the chat template does not show this message", field=field)
        return text

    def _written(self, messages: list[dict[str, object]]) -> str:
        if not self.is_continued:
            return _render(self.template, {**self.variables, "messages": messages}, self.max_chars)
        opened = [*messages[:-1], dict(messages[-1])]
        final_text = _open_final(opened)
        text = _render(self.template, {**self.variables, "messages": opened}, self.max_chars)
        return _cut_open_end(text, final_text)

    def _marked(self, messages: list[dict[str, object]]) -> str:
        with contextlib.suppress(TextRefused):
            return _render(self.template, {**self.variables, "messages": messages}, self.max_chars)
        return ""


class ChatTemplate:
    """The chat templates of one model by name, and the special tokens that they may use by variable."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables)
        self._environment = _environment()
        self._compiled: dict[str, _Compiled] = {}

    def render(self, conversation: Mapping[str, object], *, max_chars: int) -> str:
        """The prompt of `conversation`. Raises TextRefused with a message for the client.

        `conversation` has `messages` and optionally `tools`, `add_generation_prompt`,
        `continue_final_message`, `chat_template` (in place of the model's own) and `arguments`, an object of
        further variables; and `may_hide_tools` where tools that the template does not show are no error. It
        must be plain data, as read from JSON.
        """
        tools = conversation.get("tools") or None
        is_continued = conversation.get("continue_final_message") is True
        opens_answer = conversation.get("add_generation_prompt") is True
        if is_continued and opens_answer:
            raise TextRefused("continue_final_message and add_generation_prompt exclude each other")
        compiled = self._compile(self._chosen(conversation.get("chat_template"), has_tools=tools is not None))
        messages = shape_messages(conversation.get("messages"), compiled.facts)
        variables = self._variables | _arguments(conversation.get("arguments"))
        variables |= {"tools": tools, "add_generation_prompt": opens_answer}
        variables.setdefault("documents", None)
        _check_calls(messages, compiled.facts)
        rendering = _Rendering(compiled.template, variables, max_chars, is_continued)
        text = rendering.text_of(messages)
        if conversation.get("may_hide_tools") is not True:
            _check_tools(tools, text, compiled.facts)
        return text

    def _chosen(self, given: object, *, has_tools: bool) -> str:
        if isinstance(given, str) and given:
            return given
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise TextRefused(f"none of the model's chat templates is the default one: {names}")
        return self._templates[name]

    def _compile(self, source: str) -> _Compiled:
        if source not in self._compiled:
            if len(source) > MAX_TEMPLATE_CHARS:
                raise TextRefused(
                    f"the chat template has {len(source)} characters, must have at most {MAX_TEMPLATE_CHARS}"
                )
            try:
                facts = facts_of(self._environment.parse(source))
                compiled = _Compiled(self._environment.from_string(source), facts)
            except _FAULTS as error:
                raise TextRefused(f"the chat template cannot be used: {_words(error)}") from error
            while len(self._compiled) >= _MAX_COMPILED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[source] = compiled
        return self._compiled[source]


def check_template(source: str) -> None:
    """Raise TextRefused for a text that is no chat template."""
    ChatTemplate({}, {})._compile(source)


def read_templates(tokenizer_config: Mapping[str, object], chat_template: str) -> dict[str, str]:
    """The templates of a model by name; empty if it has none.

    `chat_template` is the content of its template file, which takes precedence over tokenizer_config.json.
    The latter has one text, the `default`, or a list of objects with `name` and `template`.
    """
    if chat_template:
        return {"default": chat_template}
    given = tokenizer_config.get("chat_template")
    if isinstance(given, str):
        return {"default": given} if given else {}
    if isinstance(given, dict):
        return {str(name): text for name, text in given.items() if isinstance(text, str)}
    entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def read_special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens that a template may use: `bos_token`, `eos_token` and so on."""
    named = {f"{name}_token": tokenizer_config.get(f"{name}_token") for name in _SPECIAL_TOKENS}
    extra = tokenizer_config.get("extra_special_tokens")
    found = {}
    for name, value in (named | extra if isinstance(extra, dict) else named).items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _check_calls(messages: Sequence[Mapping[str, object]], facts: TemplateFacts) -> None:
    for index, message in enumerate(messages):
        if message.get("tool_calls") and not facts.reads_calls:
            raise TextRefused(
                f"messages[{index}].tool_calls: the chat template does not show tool calls",
                field=f"messages[{index}].tool_calls",
            )


def _check_tools(tools: object, text: str, facts: TemplateFacts) -> None:
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = function.get("name", "") if isinstance(function, dict) else ""
        if not facts.reads_tools or not isinstance(name, str) or name not in text:
            raise TextRefused(f"tools: the chat template does not show the tool {name!r}", field="tools")


def _open_final(messages: list[dict[str, object]]) -> str:
    """Mark the end of the last message's text; returns that text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _OPEN_END
        return content
    parts = content if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            opened = {**part, "text": part["text"] + _OPEN_END}
            messages[-1]["content"] = [*parts[:index], opened, *parts[index + 1 :]]
            return str(part["text"])
    raise TextRefused("continue_final_message is set, but the last message has no text to continue")


def _cut_open_end(text: str, final_text: str) -> str:
    end = text.rfind(_OPEN_END.strip())
    if end < 0 or final_text.strip() not in text:
        raise TextRefused(
            "continue_final_message is set, but the chat template does not show the last message as it is"
        )
    is_trimmed = not text.startswith(_OPEN_END, end)
    return text[:end].rstrip() if is_trimmed else text[:end]


def _arguments(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TextRefused("the arguments of the chat template are not an object")
    if taken := sorted(_RESERVED & given.keys()):
        raise TextRefused(f"an argument of the chat template must not be named {taken[0]}")
    return given


def _render(template: Template, variables: Mapping[str, Any], max_chars: int) -> str:
    pieces, num_chars = [], 0
    try:
        for piece in template.generate(variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                break
            pieces.append(piece)
    except MemoryError as error:
        raise TextRefused("the chat template needs more memory than it may have") from error
    except _FAULTS as error:
        raise TextRefused(_words(error)) from error
    if num_chars > max_chars:
        raise TextRefused(f"the chat template renders more than {max_chars} characters")
    return "".join(pieces)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  The library declares it so.

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the tag, in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _GuardedNamespace(Namespace):
    """A `namespace` without names that begin with an underscore, by which code could leave the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        merged = dict(*given, **values)
        for name in merged:
            _check_name(name)
        Namespace.__init__(self, merged)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template must not keep {name}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _new_dict,
        "namespace": _GuardedNamespace,
    }
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces Jinja's filter, which escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*given: Any, **values: Any) -> dict[Any, Any]:
    return dict(*given, **values)
