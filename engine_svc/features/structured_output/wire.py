"""Reads the structured output of an ADD, and announces the grammar backends."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.structured_output.constraint import (
    Constraint,
    ConstraintKind,
    Spacing,
    Whitespace,
)
from engine_svc.features.structured_output.extras import BACKENDS, StructuredOutput
from engine_svc.features.structured_output.json_schema.keywords import ENFORCED_KEYWORDS
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.field_checks import check, unserved
from triptych_kit.subsequences import comes_last

_FIELD = "structured_output"
_AUTO = "auto"
_JSON = (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT, ConstraintKind.STRUCTURAL_TAG)
_SPACINGS = {"any_whitespace": Spacing.FREE, "disable_any_whitespace": Spacing.SINGLE}
_WHITESPACE = (*_SPACINGS, "whitespace_pattern")
_AFTER_REASONING = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
_AFTER_OPENED_REASONING = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_OPENED_REASONING


def make(config: EngineConfig) -> WireFeature | None:
    if not config.enable_structured_output or not (Path(config.model) / "tokenizer.json").is_file():
        return None
    return StructuredOutputOfAdd(tuple(name for name in BACKENDS if find_spec(name) is not None))


class StructuredOutputOfAdd(WireFeature):
    fields = (f"sampling.{_FIELD}", "reasoning_ended")

    def __init__(self, backends: tuple[str, ...]) -> None:
        self._backends = backends

    def announce(self, ready: session_pb2.Ready) -> None:
        if ready.eos_token_ids:
            ready.structured_output_backends.extend(self._backends)
            ready.structured_output_keywords.extend(ENFORCED_KEYWORDS)

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        if not entry.sampling.HasField(_FIELD):
            return None
        eos_token_ids = context.facts.eos_token_ids
        if not eos_token_ids or not self._backends:
            raise unserved(_FIELD)
        message = entry.sampling.structured_output
        backends = self._backends if message.backend in ("", _AUTO) else (message.backend,)
        if backends[0] not in self._backends:
            raise InvalidArgument(
                f"structured_output.backend is {message.backend[:64]!r}, "
                f"it takes one of {', '.join(self._backends)}",
                field="structured_output.backend",
            )
        return Parsed(
            StructuredOutput(
                _to_constraint(message),
                backends,
                _reasoning_end(entry, context),
                tuple(eos_token_ids),
                _reasoning_start(entry),
            )
        )


def _to_constraint(message: sampling_pb2.StructuredOutput) -> Constraint:
    which = message.WhichOneof("constraint")
    if which is None:
        raise InvalidArgument("structured_output has no constraint, it takes exactly one", field=_FIELD)
    kind = ConstraintKind(which)
    if kind is ConstraintKind.JSON_OBJECT and not message.json_object:
        raise InvalidArgument(f"{_FIELD}.{which} is false, it takes true alone", field=f"{_FIELD}.{which}")
    _check_json_options(message, kind)
    return Constraint(
        kind,
        "" if kind in (ConstraintKind.CHOICE, ConstraintKind.JSON_OBJECT) else getattr(message, which),
        tuple(message.choice.choices),
        whitespace=_whitespace(message),
        has_additional_properties=not message.disable_additional_properties,
        is_lenient=message.lenient,
    )


def _check_json_options(message: sampling_pb2.StructuredOutput, kind: ConstraintKind) -> None:
    """Options about JSON, which would have no effect on another constraint or on each other."""
    for option in (*_WHITESPACE, "disable_additional_properties"):
        if getattr(message, option) and kind not in _JSON:
            raise InvalidArgument(
                f"{_FIELD}.{option} is set, but {kind.value} is no JSON", field=f"{_FIELD}.{option}"
            )
    first, *others = [option for option in _WHITESPACE if getattr(message, option)] or [""]
    if others:
        raise InvalidArgument(
            f"{_FIELD}.{others[-1]} is set beside {first}, at most one is taken",
            field=f"{_FIELD}.{others[-1]}",
        )


def _whitespace(message: sampling_pb2.StructuredOutput) -> Whitespace:
    chosen = [spacing for option, spacing in _SPACINGS.items() if getattr(message, option)]
    return Whitespace(chosen[0] if chosen else Spacing.COMPACT, message.whitespace_pattern)


def _reasoning_start(entry: add_pb2.AddEntry) -> tuple[int, ...]:
    """The ids by which the output may open reasoning, before the constraint holds; () if it may not."""
    markers = entry.reasoning_options
    is_asked = entry.sampling.structured_output.start == _AFTER_OPENED_REASONING
    return tuple(markers.start_token_ids) if is_asked and markers.end_token_ids else ()


def _reasoning_end(entry: add_pb2.AddEntry, context: AddContext) -> tuple[int, ...]:
    """The ids after which the constraint holds; () from the first token, as where reasoning has ended."""
    if _reasoning_start(entry):
        return tuple(entry.reasoning_options.end_token_ids)
    if entry.sampling.structured_output.start != _AFTER_REASONING:
        return ()
    markers = entry.reasoning_options
    end, opening = tuple(markers.end_token_ids), tuple(markers.start_token_ids)
    name, limit = "reasoning_options.end_token_ids", "at least 1 id with a start AFTER_REASONING"
    check(len(end) >= 1, name, len(end), limit)
    if entry.HasField("reasoning_ended"):
        return () if entry.reasoning_ended else end
    return () if comes_last(context.token_ids, end, opening) else end
