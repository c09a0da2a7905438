"""Structured output: an output in the language of a schema, grammar or list, and calls of strict tools."""

from __future__ import annotations

import json
from collections.abc import Sequence

from google.protobuf.message import Message

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption, add_reasoning_markers
from frontend_svc.output.request_state import OutputReader
from frontend_svc.parsers.declared_tools import (
    JSON_KINDS,
    call_format,
    call_tags,
    call_trigger,
    demands_call,
    has_schema_beside_calls,
    has_strict_tools,
)
from frontend_svc.parsers.parser import ToolParserFormat
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import chat_message_pb2, generate_pb2, model_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.errors import Unimplemented
from triptych_kit.subsequences import comes_last, end_of_first

AUTO = "auto"
_FIELD = "sampling.structured_output"
# Options that say something about JSON, and the kinds of constraints that have some.
_WHITESPACE = ("any_whitespace", "disable_any_whitespace", "whitespace_pattern")
_JSON_OPTIONS = {
    **dict.fromkeys(_WHITESPACE, ("json_schema", "json_object", "structural_tag")),
    "disable_additional_properties": ("json_schema", "structural_tag"),
}

_NEED = EngineNeed(
    "takes structured output",
    "STRUCTURED_OUTPUT_NOT_READY",
    lambda model: len(model.ready.structured_output_backends) > 0,
)


def _has(backend: str) -> EngineNeed:
    return EngineNeed(
        f"has the grammar backend {backend}",
        "STRUCTURED_OUTPUT_NOT_READY",
        lambda model: backend in model.ready.structured_output_backends,
    )


_NEEDS = {backend: _has(backend) for backend in ("llguidance", "xgrammar")}


class StructuredOutput(RequestOption):
    fields = (_FIELD,)

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        has_own = request.sampling.HasField("structured_output")
        if has_own:
            _check_constraint(request.sampling.structured_output, model, violations)
            _check_served(_FIELD, model)
        if not isinstance(request, chat_message_pb2.ChatRequest):
            return
        if has_strict_tools(request):
            _check_strict_tools(request, model)
        own = request.sampling.structured_output
        if has_schema_beside_calls(request):
            field, is_fine = f"{_FIELD}.json_schema", not own.json_schema or _is_json(own.json_schema)
            violations.need(is_fine, field, own.json_schema, "must be JSON")
        elif has_own and (demands_call(request.tool_choice) or has_strict_tools(request)):
            rule = f"must be {' or '.join(JSON_KINDS)} where tool_choice demands a call or a tool is strict"
            violations.add(_FIELD, _shown(own), rule)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if not _is_constrained(request, prompt.model):
            return
        sent = entry.sampling.structured_output
        if request.sampling.HasField("structured_output"):
            sent.CopyFrom(request.sampling.structured_output)
        else:
            prompt.client_fields[_FIELD] = "tools"
        if isinstance(request, chat_message_pb2.ChatRequest) and _has_call_tags(request, prompt.model):
            sent.structural_tag = call_tags(request, _call_format(request, prompt.model))
            # That of the answer's schema stands in its tag.
            sent.ClearField("lenient")
        if sent.backend == AUTO:
            # As engines know it that are older than the name.
            sent.ClearField("backend")
        if sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_UNSPECIFIED and prompt.opens_reasoning:
            # What is asked for is the answer, and the message begins within the reasoning.
            sent.start = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
        elif sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_UNSPECIFIED and prompt.may_open_reasoning:
            sent.start = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_OPENED_REASONING
        if sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_OPENED_REASONING:
            await add_reasoning_markers(f"{_FIELD}.start", prompt.model, entry)
            prompt.constrained_after = tuple(entry.reasoning_options.end_token_ids)
            prompt.constrained_unless = tuple(entry.reasoning_options.start_token_ids)
        elif sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING:
            await add_reasoning_markers(f"{_FIELD}.start", prompt.model, entry)
            opening, closing = entry.reasoning_options.start_token_ids, entry.reasoning_options.end_token_ids
            is_open = prompt.opens_reasoning or not comes_last(prompt.token_ids, closing, opening)
            entry.reasoning_ended = not is_open
            if is_open:
                prompt.constrained_after = tuple(closing)
        prompt.needs.append(_NEEDS.get(sent.backend, _NEED))

    def need(self, request: AnyRequest) -> EngineNeed | None:
        if request.sampling.HasField("structured_output"):
            return _NEEDS.get(request.sampling.structured_output.backend, _NEED)
        is_strict = isinstance(request, chat_message_pb2.ChatRequest) and has_strict_tools(request)
        return _NEED if is_strict else None

    def describe(self, model: ServedModel, card: model_pb2.Model) -> None:
        card.structured_output_keywords.extend(model.ready.structured_output_keywords)

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        if not _is_constrained(request, prompt.model):
            return None
        return _EndReader(prompt.constrained_after, prompt.constrained_unless)


class _EndReader:
    """Marks outputs that ended otherwise than where their language may end, or before it began."""

    extra = ""
    is_awaited = False

    def __init__(self, constrained_after: Sequence[int], constrained_unless: Sequence[int] = ()) -> None:
        self._constrained_after = constrained_after
        self._constrained_unless = list(constrained_unless)

    def read(self, extra: step_pb2.StepExtra) -> None:
        return

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None:
        if isinstance(message, generate_pb2.Finished | generate_pb2.Output | chat_message_pb2.ChatOutput):
            # A stop string cuts an output, a token ends it.
            is_cut = message.stop_match.WhichOneof("match") == "string"
            opening = self._constrained_unless
            has_begun = list(output_token_ids[: len(opening)]) != opening or (
                end_of_first(output_token_ids, self._constrained_after) >= 0
            )
            is_stopped = message.reason == output_pb2.FINISH_REASON_STOP
            message.is_incomplete = not (is_stopped and has_begun) or is_cut


def _is_constrained(request: AnyRequest, model: ServedModel) -> bool:
    if request.sampling.HasField("structured_output"):
        return True
    return isinstance(request, chat_message_pb2.ChatRequest) and _has_call_tags(request, model)


def _has_call_tags(request: chat_message_pb2.ChatRequest, model: ServedModel) -> bool:
    return bool(call_trigger(request, _call_format(request, model), model.ready))


def _call_format(request: chat_message_pb2.ChatRequest, model: ServedModel) -> ToolParserFormat | None:
    return call_format(request, model.parsers.tool, model.ready)


def _check_served(field: str, model: ServedModel) -> None:
    if not model.ready.structured_output_backends:
        raise Unimplemented(
            f"not served: {field} (engines of model {model.name!r} have no grammar backend)",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": field},
        )


def _check_strict_tools(request: chat_message_pb2.ChatRequest, model: ServedModel) -> None:
    index = next(index for index, tool in enumerate(request.tools) if tool.strict)
    field = f"tools[{index}].strict"
    _check_served(field, model)
    if not _has_call_tags(request, model):
        raise Unimplemented(
            f"not served: {field} (model {model.name!r} has no tool parser: start with --tool-parser, or "
            "demand a call)",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": field},
        )


def _check_constraint(
    constraint: sampling_pb2.StructuredOutput, model: ServedModel, violations: Violations
) -> None:
    kind = constraint.WhichOneof("constraint")
    if kind is None:
        names = ", ".join(field.name for field in constraint.DESCRIPTOR.oneofs_by_name["constraint"].fields)
        violations.add(_FIELD, None, f"must have exactly one of {names}")
        return
    if kind == "json_object":
        violations.need(constraint.json_object, f"{_FIELD}.{kind}", constraint.json_object, "must be true")
    for name, kinds in _JSON_OPTIONS.items():
        is_fine = not getattr(constraint, name) or kind in kinds
        violations.need(is_fine, f"{_FIELD}.{name}", getattr(constraint, name), f"must be unset for {kind}")
    first, *others = [name for name in _WHITESPACE if getattr(constraint, name)] or [""]
    for name in others:
        rule = f"must be unset where {first} is true"
        violations.add(f"{_FIELD}.{name}", getattr(constraint, name), rule)
    backends = (*model.ready.structured_output_backends, AUTO)
    is_known = len(backends) == 1 or not constraint.backend or constraint.backend in backends
    violations.need(
        is_known, f"{_FIELD}.backend", constraint.backend, f"must be one of {', '.join(backends)}"
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _shown(constraint: sampling_pb2.StructuredOutput) -> str:
    return constraint.WhichOneof("constraint") or ""
