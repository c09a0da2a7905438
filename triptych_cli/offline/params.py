"""Parameters of `LLM` and their conversion to protos, with the server's checks that need no model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.descriptor import FieldDescriptor

from frontend_svc.options import OPTIONS
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import GenerationDefaults, ServedModel
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_cli.vllm_names import with_checked_arguments
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.plain_fields import plain_fields
from triptych_kit.rules import MAX_LOGPROBS, MAX_N, MessageRules

if TYPE_CHECKING:
    from triptych_cli.offline.plain_params import PlainParams  # `make protos` writes its stub.

# What a server may be configured to accept, and a model of every size.
_WIDEST_LIMITS = {MAX_N: 2**31, MAX_LOGPROBS: -1}
_ANY_MODEL = ServedModel(
    name="",
    text_key="",
    fingerprint="",
    tokenizer=cast(Any, None),  # No check reads text.
    defaults=GenerationDefaults(),
    max_model_len=2**31,
    vocab_size=2**32,
    eos_token_ids=(),
)
_RULES = MessageRules(generate_pb2.GenerateRequest)
_PREFIX = "sampling."
_FIELDS = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
# Written in another form than the contract's, and of streams alone.
_NOT_PLAIN = frozenset({"stop", "stream_interval"})
_WITH_TRUTH_VALUES = frozenset({"structured_output"})


@with_checked_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends an output whose tail repeats one token pattern."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@with_checked_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Constrains an output to a grammar; exactly one of the first six fields must be set."""

    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    any_whitespace: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str = ""
    disable_additional_properties: bool = False
    backend: str = ""
    lenient: bool = False


def plain_params() -> list[tuple[str, Any, Any]]:
    """Name, type and default of each parameter that Python writes as the contract does."""
    params: list[tuple[str, Any, Any]] = []
    for name, kind in plain_fields(sampling_pb2.SamplingParams).items():
        if name in _NOT_PLAIN:
            continue
        if _FIELDS[name].is_repeated:
            params.append((name, Sequence[kind.__args__], ()))  # type: ignore[name-defined]
        elif _FIELDS[name].has_presence:
            params.append((name, kind | None, None))
        else:
            params.append((name, kind, _FIELDS[name].default_value))
    return params


if not TYPE_CHECKING:
    PlainParams = make_dataclass("PlainParams", plain_params(), frozen=True, slots=True, kw_only=True)


@with_checked_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(PlainParams):
    """How tokens are sampled and returned; the fields are those of `triptych.common.v1.SamplingParams`.

    Without `max_tokens` an output goes on to the model's own max_new_tokens, else until its context is full.

    None, or an empty list, means unset: the model's or the server's default.
    """

    stop: str | Sequence[str] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured_output: StructuredOutput | None = None
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a value of a wrong type or range."""
        _check_ranges(self.to_proto())

    def to_proto(self) -> sampling_pb2.SamplingParams:
        values = asdict(self)
        values["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        message = sampling_pb2.SamplingParams()
        for name, value in values.items():
            if value is None:
                continue
            try:
                message.MergeFrom(sampling_pb2.SamplingParams(**{name: _on_the_wire(name, value)}))
            except (TypeError, ValueError, AttributeError) as error:
                raise InvalidArgument(f"{name} is {value!r}: {error}", field=name) from error
        return message


def from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Parameters from a message of plain numbers, such as a model's defaults."""
    return SamplingParams(**{descriptor.name: value for descriptor, value in message.ListFields()})


def _check_ranges(sampling: sampling_pb2.SamplingParams) -> None:
    violations = Violations()
    request = generate_pb2.GenerateRequest(sampling=sampling)
    violations.extend(_RULES.violations(request, _WIDEST_LIMITS))
    for option in OPTIONS:
        # Whether a model serves a parameter is found when it is asked.
        with contextlib.suppress(Unimplemented):
            option.check(request, _ANY_MODEL, violations)
    try:
        violations.raise_if_any()
    except InvalidArgument as error:
        shown = [
            (field.removeprefix(_PREFIX), text.removeprefix(_PREFIX)) for field, text in error.violations
        ]
        raise InvalidArgument("; ".join(text for _, text in shown), violations=shown) from None


def _on_the_wire(name: str, value: Any) -> Any:
    _refuse_truth_values(name, value)
    if name == "logit_bias":
        return [sampling_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in value.items()]
    if name == "structured_output":
        fields = {key: part for key, part in value.items() if part is not None}
        if "choice" in fields:
            fields["choice"] = sampling_pb2.StructuredChoice(choices=fields["choice"])
        return sampling_pb2.StructuredOutput(**fields)
    if name == "repetition_detection":
        return sampling_pb2.RepetitionDetection(**value)
    return value


def _refuse_truth_values(name: str, value: Any) -> None:
    # Python and protobuf accept True as the number 1, but it is a mistake of the caller.
    if name in _WITH_TRUTH_VALUES or _FIELDS[name].type == FieldDescriptor.TYPE_BOOL:
        return
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    for part in parts if isinstance(parts, list | tuple) else (parts,):
        if isinstance(part, bool):
            raise TypeError("a boolean is not a number")
