"""The request bodies of OpenAI's API, with vLLM's extra parameters. Types alone are checked here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
import msgspec.inspect

from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.plain_fields import plain_fields

# Accepted, without an effect on the answer; a header of the response names them.
IGNORED = frozenset(
    {
        "metadata", "modalities", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user", "verbosity",
    }
)  # fmt: skip
# Of OpenAI or vLLM, with an effect that is not served here, and what to use instead.
REFUSED = {
    "audio": "there is no audio",
    "best_of": "use n",
    "echo": "use prompt_logprobs, or Generate over gRPC",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "suffix": "text is not filled in",
    "use_beam_search": "there is no beam search",
    "web_search_options": "there is no web search",
}
# Sampling parameters that some bodies lack, or have by another name or in another form.
_OF_SOME_BODIES = frozenset(
    {"max_tokens", "n", "seed", "stop", "logprobs", "prompt_logprobs", "include_stop_in_output"}
)
# Sampling parameters that no body has.
_OF_GRPC = frozenset({"detokenize", "logprob_token_ids", "stream_interval", "skip_reading_prefix_cache"})
_MAX_NAME_CHARS = 64  # of an unknown field that is compared with those that there are
_STEP = re.compile(r"(\w+)|\[")
_MAX_DEPTH_MESSAGE = "the body is nested too deeply"


class Base(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An unknown field is an error that names it."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED


class StreamOptions(Base):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class JSONSchema(Base):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Base):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(Base):
    """vLLM's `structured_outputs`; one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Function(Base):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Base):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Base):
    name: str


class NamedTool(Base):
    function: NamedFunction
    type: Literal["function"] = "function"


class CalledFunction(Base):
    name: str
    arguments: str = ""


class CalledTool(Base):
    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Part(Base, forbid_unknown_fields=False):
    """A part of a message. One that is no text is refused by its type, whatever its other fields are."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Base):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


# Of every body: the sampling parameters that have the contract's names and types there.
SAME_SAMPLING = {
    name: kind
    for name, kind in plain_fields(sampling_pb2.SamplingParams).items()
    if name not in _OF_SOME_BODIES | _OF_GRPC
}
if TYPE_CHECKING:
    SameSampling = Base
else:
    SameSampling = msgspec.defstruct(
        "SameSampling",
        [(name, kind | None, None) for name, kind in SAME_SAMPLING.items()],
        bases=(Base,),
        module=__name__,
        kw_only=True,
    )


class SamplingBody(SameSampling, kw_only=True):
    """The fields that completions and chats have in common."""

    model: str = ""
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[Any]  # a text, ids, or a list of either
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    orphan_grace_ms: int | None = None  # as over gRPC: the stream can be resumed


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Base, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Base, kw_only=True):
    tokens: list[int]
    model: str = ""


def text_of(part: Part, at: str, kinds: Collection[str] = ("text", "refusal")) -> str:
    """The text of a part, which is at `at` in the body. Raises Unimplemented for one of no kind of text."""
    if part.type not in kinds:
        raise Unimplemented(
            f"{at}.type is {part.type!r:.60}, which is not served: models here read text",
            metadata={"field": f"{at}.type"},
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidArgument(f"{at}.{name} is missing", field=f"{at}.{name}")
    return text


BodyT = TypeVar("BodyT", bound=Base)


def read_body(content: bytes, kind: type[BodyT]) -> tuple[BodyT, list[str]]:
    """The body, and the names of its fields that have no effect.

    A field that is null counts as unset. Raises InvalidArgument and Unimplemented with the field's name.
    """
    try:
        record = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(_MAX_DEPTH_MESSAGE) from error
    if not isinstance(record, dict):
        raise InvalidArgument("the body is not a JSON object")
    return read_object(record, kind)


def read_object(record: Mapping[str, Any], kind: type[BodyT]) -> tuple[BodyT, list[str]]:
    """`read_body` for JSON that was parsed."""
    ignored, fields = [], {}
    for name, value in record.items():
        if value is None:
            continue
        if name in kind.refused and value is not False:
            raise Unimplemented(f"{name} is not served: {kind.refused[name]}", metadata={"field": name})
        if name in kind.ignored:
            ignored.append(name)
        elif name not in kind.refused:
            fields[name] = value
    return read_part(fields, kind), sorted(ignored)


def read_part(fields: Mapping[str, Any], kind: type[BodyT], at: str = "") -> BodyT:
    """An object of a body; `at` is its field there. Raises InvalidArgument with the field's name."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = ".".join(filter(None, (at, path.rstrip("`"))))
        if message.startswith("Object contains unknown field"):
            name = message.partition("`")[2].rstrip("`")
            field = f"{field}.{name}" if field else name
            hint = _hint(name, _known_at(kind, path.rstrip("`")))
            raise InvalidArgument(f"{field} is not served{hint}", field=field) from error
        if message.startswith("Object missing required field"):
            name = message.partition("`")[2].rstrip("`")
            field = f"{field}.{name}" if field else name
            raise InvalidArgument(f"{field} is missing", field=field) from error
        raise InvalidArgument(f"{field}: {message}", field=field) from error
    except RecursionError as error:
        raise InvalidArgument(_MAX_DEPTH_MESSAGE) from error


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= _MAX_NAME_CHARS else []
    return f"; did you mean {near[0]}?" if near else ""


def _known_at(kind: type[Base], path: str) -> list[str]:
    """The fields of the object at a path like `messages[0].content`."""
    types = _alternatives(msgspec.inspect.type_info(kind))
    for step in _STEP.finditer(re.sub(r"\[[^]]*]", "[", path)):
        inner: list[msgspec.inspect.Type] = []
        for each in types:
            if isinstance(each, msgspec.inspect.StructType) and step[1]:
                inner += [field.type for field in each.fields if field.encode_name == step[1]]
            elif isinstance(each, msgspec.inspect.ListType) and not step[1]:
                inner.append(each.item_type)
        types = [one for each in inner for one in _alternatives(each)]
    structs = [each for each in types if isinstance(each, msgspec.inspect.StructType)]
    return [field.encode_name for each in structs for field in each.fields]


def _alternatives(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind]
