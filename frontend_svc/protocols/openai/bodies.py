"""The request bodies of OpenAI's API, with vLLM's extra parameters. Types alone are checked here."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import msgspec
import msgspec.inspect
from google.protobuf.message import Message as ProtoMessage

from frontend_svc.protocols.openai.fields import (
    IGNORED_IN_CALLS,
    IGNORED_IN_CHATS,
    IGNORED_IN_MESSAGES,
    IGNORED_IN_TOOLS,
    MEDIA,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_TOKENIZE,
    Refusal,
)
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.exact_json import LongNumber
from triptych_kit.plain_fields import plain_fields

# Sampling parameters that some bodies lack, or have by another name or in another form.
_OF_SOME_BODIES = frozenset(
    {"max_tokens", "n", "seed", "stop", "logprobs", "prompt_logprobs", "include_stop_in_output"}
)
# Sampling parameters that no body has.
_OF_GRPC = frozenset({"detokenize", "logprob_token_ids", "stream_interval", "skip_reading_prefix_cache"})
_MAX_NAME_CHARS = 64  # of an unknown field that is compared with those that there are
_MAX_UNKNOWN = 64  # fields of a body that are taken; comparing names takes time
_SIMILAR = 0.6  # to a served field, which is then suggested
_MISSPELT = 0.8  # similarity from which an unknown field is a served one with a mistake
_STEP = re.compile(r"(\w+)|\[")
# Fields with schemas, whose numbers keep all their digits.
_WITH_SCHEMAS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "tools", "functions", "text", "output_config"}
)
_UNKNOWN = "Object contains unknown field"
_NOT_OF_LIST = "Invalid enum value"
_MAX_DEPTH_MESSAGE = "the body is nested too deeply"


class Base(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An unknown field is an error that names it."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}


class StreamOptions(Base):
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JSONSchema(Base):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Base):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(Base):
    """vLLM's `structured_outputs`: at most one of the first six; options also beside response_format.

    Not of vLLM: `lenient`, `backend` and `start`.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    any_whitespace: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False
    backend: str | None = None
    start: Literal["at_once", "after_reasoning", "after_opened_reasoning"] | None = None


class Function(Base):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Base):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_TOOLS

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Base):
    name: str


class NamedTool(Base):
    function: NamedFunction
    type: Literal["function"] = "function"


# One that names a tool is read once it is known that its type is served.
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]


class CalledFunction(Base):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_CALLS

    name: str
    arguments: str = ""


class CalledTool(Base):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_CALLS

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    incomplete: bool = False  # as in an answer; such a call is refused


class Part(Base, forbid_unknown_fields=False):
    """A part of a message. One that is no text is refused by its type, whatever its other fields are."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Base):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: None = None
    function_call: None = None
    refusal: str | None = None  # as in an answer, in place of its text


def _struct_of(message: type[ProtoMessage]) -> type[Base]:
    fields = [(name, kind | None, None) for name, kind in plain_fields(message).items()]
    struct = msgspec.defstruct(message.DESCRIPTOR.name, fields, bases=(Base,), module=__name__, kw_only=True)
    return cast("type[Base]", struct)


# Of every body: the sampling parameters that have the contract's names and types there.
SAME_SAMPLING = {
    name: kind
    for name, kind in plain_fields(sampling_pb2.SamplingParams).items()
    if name not in _OF_SOME_BODIES | _OF_GRPC
} | {"repetition_detection": _struct_of(sampling_pb2.RepetitionDetection)}
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


class GenerationBody(SameSampling, kw_only=True):
    """The fields that completions, chats and responses have in common."""

    model: str = ""
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's.
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # As over gRPC.
    job_id: str | None = None
    is_last_step: bool | None = None


class SamplingBody(GenerationBody, kw_only=True):
    """The fields that completions and chats have in common."""

    ignored: ClassVar[frozenset[str]] = IGNORED_IN_CHATS

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    request_id: str | None = None


class CompletionBody(SamplingBody, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_COMPLETIONS

    prompt: str | list[Any]  # a text, ids, or a list of either
    echo: bool = False  # with 0 as max_tokens, the answer is the prompt alone
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    orphan_grace_ms: int | None = None  # as over gRPC: the stream can be resumed


class ChatBody(SamplingBody, kw_only=True):
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_CHATS

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Base, kw_only=True):
    """add_special_tokens: true for a prompt and false for messages, unless it is set."""

    ignored: ClassVar[frozenset[str]] = IGNORED_IN_CHATS
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_TOKENIZE

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_CHATS

    tokens: list[int]
    model: str = ""


class IgnoredFields(list[str]):
    """The names of a body's fields without an effect.

    takes_unknown: unknown fields are among them, unless they look like served ones with a mistake.
    """

    def __init__(self, *, takes_unknown: bool = False) -> None:
        super().__init__()
        self._num_taken, self._max_taken = 0, _MAX_UNKNOWN if takes_unknown else 0

    def take(self, name: str, known: Collection[str]) -> bool:
        """Whether an unknown field is taken, beside the ones that its object can have."""
        if self._num_taken == self._max_taken or is_misspelt(name, known):
            return False
        self._num_taken += 1
        return True


def is_misspelt(name: str, known: Collection[str]) -> bool:
    """Whether a name is surely one of the known ones with a mistake."""
    return _nearest(name, known, _MISSPELT) is not None


def _nearest(name: str, known: Collection[str], similarity: float) -> str | None:
    if len(name) > _MAX_NAME_CHARS:
        return None
    by_plain = {_plain(each): each for each in known}
    near = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=similarity)
    return by_plain[near[0]] if near else None


def _plain(name: str) -> str:
    """Equal for names that differ in their case alone, such as top_p and topP."""
    return name.lower().replace("_", "").replace("-", "")


def text_of(part: Part, at: str, kinds: Collection[str] = ("text", "refusal")) -> str:
    """The text of a part, which is at `at` in the body. Raises Unimplemented for one of no kind of text."""
    if part.type not in kinds:
        media = MEDIA.get(part.type)
        reason = "which is not served" if media is None else f"and {media} are not served"
        raise Unimplemented(
            f"{at}.type is {part.type!r:.60}, {reason}: models here read text",
            metadata={"field": f"{at}.type"},
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidArgument(f"{at}.{name} is missing", field=f"{at}.{name}")
    return text


BodyT = TypeVar("BodyT", bound=Base)


def read_body(
    content: bytes, kind: type[BodyT], *, takes_unknown: bool = False
) -> tuple[BodyT, IgnoredFields]:
    """The body, and the names of its fields that have no effect.

    A field that is null counts as unset. Raises InvalidArgument and Unimplemented with the field's name.
    """
    long_numbers: list[LongNumber] = []

    def number(text: str) -> float:
        value = LongNumber.of(text)
        if isinstance(value, LongNumber):
            long_numbers.append(value)
        return value

    try:
        record = msgspec.json.Decoder(float_hook=number).decode(content)
        if not isinstance(record, dict):
            raise InvalidArgument("the body is not a JSON object")
        if long_numbers:
            record = {
                name: value if name in _WITH_SCHEMAS else _as_floats(value, name)
                for name, value in record.items()
            }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(_MAX_DEPTH_MESSAGE) from error
    return read_object(record, kind, takes_unknown=takes_unknown)


def encode(content: Any) -> bytes:
    """JSON of an answer, which may repeat schemas of its request."""
    return _encode(content)


def json_text(value: Any) -> str:
    """A part of a body, such as a schema, as JSON with all digits of its numbers. Raises InvalidArgument."""
    try:
        return _encode(value).decode()
    except RecursionError as error:
        raise InvalidArgument(_MAX_DEPTH_MESSAGE) from error


def _digits(value: Any) -> msgspec.Raw:
    if isinstance(value, LongNumber):
        return msgspec.Raw(value.text.encode())
    raise NotImplementedError(f"{type(value).__name__} in an answer")


_encode = msgspec.json.Encoder(enc_hook=_digits).encode


def _as_floats(value: Any, at: str) -> Any:
    """A part of a body with plain numbers. Raises InvalidArgument for one out of range."""
    if isinstance(value, dict):
        return {name: _as_floats(part, f"{at}.{name}") for name, part in value.items()}
    if isinstance(value, list):
        return [_as_floats(part, f"{at}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, float) and math.isinf(value):
        raise InvalidArgument(f"{at} is a number out of range", field=at)
    return float(value) if isinstance(value, LongNumber) else value


def read_object(
    record: Mapping[str, Any], kind: type[BodyT], *, takes_unknown: bool = False, at: str = ""
) -> tuple[BodyT, IgnoredFields]:
    """`read_body` for JSON that was parsed, or for an object at the field `at` of it."""
    ignored, fields = IgnoredFields(takes_unknown=takes_unknown), {}
    for name, value in record.items():
        if value is None:
            continue
        refusal = kind.refused.get(name)
        if refusal is None:
            fields[name] = value
        elif not refusal.is_idle(value):
            field = f"{at}.{name}" if at else name
            raise Unimplemented(f"{field} is not served: {refusal.reason}", metadata={"field": field})
    return read_part(fields, kind, ignored, at), ignored


def read_part(fields: Mapping[str, Any], kind: type[BodyT], ignored: IgnoredFields, at: str = "") -> BodyT:
    """An object of a body; `at` is its field there. Raises InvalidArgument with the field's name.

    Fields without an effect are left out, and their names added to `ignored`.
    """
    try:
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
            return msgspec.convert(_without_ignored(fields, _type_of(kind), ignored, at), kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = ".".join(filter(None, (at, path.rstrip("`"))))
        if message.startswith(_UNKNOWN):
            name = message.partition("`")[2].rstrip("`")
            field = f"{field}.{name}" if field else name
            hint = _hint(name, _known_at(kind, path.rstrip("`")))
            raise InvalidArgument(f"{field} is not served{hint}", field=field) from error
        if message.startswith("Object missing required field"):
            name = message.partition("`")[2].rstrip("`")
            field = f"{field}.{name}" if field else name
            raise InvalidArgument(f"{field} is missing", field=field) from error
        if message.startswith(_NOT_OF_LIST):
            value = message.removeprefix(_NOT_OF_LIST)
            values = ", ".join(_values_at(kind, path.rstrip("`")))
            raise InvalidArgument(f"{field} is{value:.60}, must be one of {values}", field=field) from error
        raise InvalidArgument(f"{field}: {message}", field=field) from error
    except RecursionError as error:
        raise InvalidArgument(_MAX_DEPTH_MESSAGE) from error


def _without_ignored(value: Any, kind: msgspec.inspect.Type, ignored: IgnoredFields, at: str) -> Any:
    """A value without the fields that have no effect, null ones among them."""
    kinds = _alternatives(kind)
    if isinstance(value, list):
        items = [each.item_type for each in kinds if isinstance(each, msgspec.inspect.ListType)]
        if len(items) != 1:
            return value
        return [_without_ignored(one, items[0], ignored, f"{at}[{index}]") for index, one in enumerate(value)]
    structs = [each for each in kinds if isinstance(each, msgspec.inspect.StructType)]
    if not isinstance(value, Mapping) or len(structs) != 1 or not structs[0].forbid_unknown_fields:
        return value
    cls, known = structs[0].cls, {field.encode_name: field.type for field in structs[0].fields}
    kept = {}
    for name, one in value.items():
        field = f"{at}.{name}" if at else name
        if name in known:
            kept[name] = _without_ignored(one, known[name], ignored, field)
        elif one is None:
            continue
        elif (issubclass(cls, Base) and name in cls.ignored) or ignored.take(name, known):
            ignored.append(field)
        else:
            kept[name] = one
    return kept


def _hint(name: str, known: Collection[str]) -> str:
    near = _nearest(name, known, _SIMILAR)
    return "" if near is None else f"; did you mean {near}?"


@functools.cache
def _type_of(kind: type[Base]) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def _known_at(kind: type[Base], path: str) -> list[str]:
    """The fields of the object at a path like `messages[0].content`."""
    structs = [each for each in _types_at(kind, path) if isinstance(each, msgspec.inspect.StructType)]
    return [field.encode_name for each in structs for field in each.fields]


def _values_at(kind: type[Base], path: str) -> list[str]:
    """The texts of which one has to be at a path."""
    lists = [each for each in _types_at(kind, path) if isinstance(each, msgspec.inspect.LiteralType)]
    return [str(value) for each in lists for value in each.values]


def _types_at(kind: type[Base], path: str) -> Sequence[msgspec.inspect.Type]:
    types = _alternatives(_type_of(kind))
    for step in _STEP.finditer(re.sub(r"\[[^]]*]", "[", path)):
        inner: list[msgspec.inspect.Type] = []
        for each in types:
            if isinstance(each, msgspec.inspect.StructType) and step[1]:
                inner += [field.type for field in each.fields if field.encode_name == step[1]]
            elif isinstance(each, msgspec.inspect.ListType) and not step[1]:
                inner.append(each.item_type)
        types = [one for each in inner for one in _alternatives(each)]
    return types


def _alternatives(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind]
