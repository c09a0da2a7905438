"""Structured output: an output in the language of a schema, grammar or list, and calls of strict tools."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TypeAlias

from google.protobuf.message import Message

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption, add_reasoning_markers
from frontend_svc.output.request_state import OutputReader
from frontend_svc.text.chat.call_tags import call_tags, demands_call, has_call_tags, has_strict_tools
from frontend_svc.text.constraint import INVALID, NOT_ENFORCED, AskedConstraint, CheckedConstraint
from frontend_svc.text.json_schema.keywords import BACKENDS
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.workers.workers import TextWorkers
from service_kit.errors import InvalidArgument, Unimplemented
from service_kit.grammars.constraint import Constraint, ConstraintKind, Whitespace
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, step_pb2

Answered: TypeAlias = "generate_pb2.Finished | generate_pb2.Output | chat_message_pb2.ChatOutput"

AUTO = "auto"
_FIELD = "sampling.structured_output"
_TEXTS = ("json_schema", "regex", "grammar", "structural_tag")
_MAX_CHARS = 1024 * 1024
_MAX_CHOICES = 4096
_MAX_CHOICE_CHARS = 16_384
# Options that say something about JSON, and the kinds of constraints that have some.
_JSON_OPTIONS = {
    "disable_any_whitespace": ("json_schema", "json_object", "structural_tag"),
    "whitespace_pattern": ("json_schema", "json_object", "structural_tag"),
    "disable_additional_properties": ("json_schema", "structural_tag"),
}
_MAX_TENANT_BYTES = 4 * 1024 * 1024
_MAX_BYTES = 32 * 1024 * 1024
_VERDICT_BYTES = 512  # beside its text
_FOR_GOOD = (INVALID, NOT_ENFORCED)

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


_NEEDS = {backend: _has(backend) for backend in BACKENDS}

Verdict: TypeAlias = "CheckedConstraint | tuple[str, str]"  # a refusal is message and reason


class Verdicts:
    """What workers found of constraints, the least recently used of a tenant forgotten first.

    Of each tenant so many bytes, so that none can drop those of others: with tenants that are not
    distinguished, those who share a cache salt. A check that took too long or too much says nothing about
    the constraint and is not kept. Equal constraints at the same time are checked once.
    """

    def __init__(self, max_tenant_bytes: int = _MAX_TENANT_BYTES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_tenant_bytes = max_tenant_bytes
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, OrderedDict[bytes, Verdict]] = OrderedDict()
        self._num_bytes: dict[str, int] = {}
        self._running: dict[tuple[str, bytes], asyncio.Task[CheckedConstraint]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    async def check(
        self, tenant: str, asked: AskedConstraint, workers: TextWorkers, field: str
    ) -> CheckedConstraint:
        """Raises InvalidArgument."""
        digest = hashlib.sha256(asked.to_json()).digest()
        found = self._find(tenant, digest)
        if isinstance(found, CheckedConstraint):
            return found
        if found is not None:
            message, reason = found
            raise InvalidArgument(message, field=field, reason=reason)
        key = (tenant, digest)
        running = self._running.get(key)
        if running is None:
            running = asyncio.ensure_future(self._checked(tenant, digest, asked, workers, field))
            self._running[key] = running
            running.add_done_callback(lambda task: self._ended(key, task))
        # One of several requests that wait may be cancelled.
        return await asyncio.shield(running)

    def _ended(self, key: tuple[str, bytes], task: asyncio.Task[CheckedConstraint]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # all that waited may be cancelled

    async def _checked(
        self, tenant: str, digest: bytes, asked: AskedConstraint, workers: TextWorkers, field: str
    ) -> CheckedConstraint:
        try:
            checked = await workers.check_constraint(asked, field)
        except InvalidArgument as error:
            if error.reason in _FOR_GOOD:
                self._keep(tenant, digest, (error.message, error.reason))
            raise
        self._keep(tenant, digest, checked)
        return checked

    def _find(self, tenant: str, digest: bytes) -> Verdict | None:
        verdicts = self._tenants.get(tenant)
        if verdicts is None or digest not in verdicts:
            return None
        self._tenants.move_to_end(tenant)
        verdicts.move_to_end(digest)
        return verdicts[digest]

    def _keep(self, tenant: str, digest: bytes, verdict: Verdict) -> None:
        verdicts = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        verdicts[digest] = verdict
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + _size(verdict)
        while self._num_bytes[tenant] > self._max_tenant_bytes:
            self._forget_one(tenant)
        while sum(self._num_bytes.values()) > self._max_bytes:
            self._forget_one(next(iter(self._tenants)))

    def _forget_one(self, tenant: str) -> None:
        verdicts = self._tenants[tenant]
        self._num_bytes[tenant] -= _size(verdicts.popitem(last=False)[1])
        if not verdicts:
            del self._tenants[tenant], self._num_bytes[tenant]


class StructuredOutput(RequestOption):
    fields = (_FIELD,)

    def __init__(self) -> None:
        self._verdicts = Verdicts()

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        has_own = request.sampling.HasField("structured_output")
        if has_own:
            _check_served(_FIELD, model)
            _check_constraint(request.sampling.structured_output, model, violations)
        if not isinstance(request, chat_message_pb2.ChatRequest):
            return
        if has_strict_tools(request):
            _check_strict_tools(request, model)
        if has_own and (demands_call(request.tool_choice) or has_strict_tools(request)):
            rule = "must be unset where tool_choice demands a call or a tool is strict"
            violations.add(_FIELD, _shown(request.sampling.structured_output), rule)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if not _is_constrained(request, prompt.model):
            return
        sent = entry.sampling.structured_output
        field = _FIELD
        lenient_tags: tuple[bool, ...] = ()
        if request.sampling.HasField("structured_output"):
            sent.CopyFrom(request.sampling.structured_output)
        else:
            assert isinstance(request, chat_message_pb2.ChatRequest)
            tags = call_tags(request, prompt.model)
            field, lenient_tags, sent.structural_tag = "tools", tags.is_lenient, tags.document
        asked = AskedConstraint(
            _constraint_of(sent), _allowed_backends(sent.backend, prompt.model), sent.lenient, lenient_tags
        )
        checked = await self._verdicts.check(request.cache_salt, asked, prompt.model.tokenizer.workers, field)
        sent.backend = checked.backend
        kind = sent.WhichOneof("constraint")
        if kind in ("json_schema", "structural_tag"):
            setattr(sent, kind, checked.text)
            sent.ClearField("disable_additional_properties")
            sent.ClearField("lenient")
        if sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_UNSPECIFIED and prompt.opens_reasoning:
            sent.start = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
        if sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING:
            await add_reasoning_markers(f"{_FIELD}.start", prompt.model, entry)
        prompt.needs.append(_NEEDS.get(checked.backend, _NEED))

    def need(self, request: AnyRequest) -> EngineNeed | None:
        if request.sampling.HasField("structured_output"):
            return _NEEDS.get(request.sampling.structured_output.backend, _NEED)
        is_strict = isinstance(request, chat_message_pb2.ChatRequest) and has_strict_tools(request)
        return _NEED if is_strict else None

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        return _EndReader() if _is_constrained(request, prompt.model) else None


class _EndReader:
    """Marks outputs that ended otherwise than where their language may end."""

    extra = ""
    is_awaited = False

    def read(self, extra: step_pb2.StepExtra) -> None:
        return

    def fill(self, message: Message) -> None:
        if isinstance(message, generate_pb2.Finished | generate_pb2.Output | chat_message_pb2.ChatOutput):
            # A stop string cuts an output, a token ends it.
            is_cut = message.stop_match.WhichOneof("match") == "string"
            message.is_incomplete = message.reason != output_pb2.FINISH_REASON_STOP or is_cut


def _is_constrained(request: AnyRequest, model: ServedModel) -> bool:
    if request.sampling.HasField("structured_output"):
        return True
    return isinstance(request, chat_message_pb2.ChatRequest) and has_call_tags(request, model)


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
    if not has_call_tags(request, model):
        raise Unimplemented(
            f"not served: {field} (no grammar is known for the calls of tool parser {model.parsers.tool!r})",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": field},
        )


def _check_constraint(
    asked: sampling_pb2.StructuredOutput, model: ServedModel, violations: Violations
) -> None:
    kind = asked.WhichOneof("constraint")
    if kind is None:
        names = ", ".join(field.name for field in asked.DESCRIPTOR.oneofs_by_name["constraint"].fields)
        violations.add(_FIELD, None, f"must have exactly one of {names}")
        return
    field = f"{_FIELD}.{kind}"
    if kind in _TEXTS:
        text = getattr(asked, kind)
        violations.need_count(field, len(text), "characters", 1, _MAX_CHARS)
        _check_nul(field, text, violations)
    elif kind == "json_object":
        violations.need(asked.json_object, field, asked.json_object, "must be true")
    else:
        field, choices = f"{field}.choices", asked.choice.choices
        violations.need(len(choices) > 0, field, [], "must not be empty")
        violations.need_texts(field, choices, "texts", _MAX_CHOICES, max_chars=_MAX_CHOICE_CHARS)
        for index, choice in enumerate(choices[:_MAX_CHOICES]):
            _check_nul(field, choice, violations, index=index)
    for name, kinds in _JSON_OPTIONS.items():
        is_fine = not getattr(asked, name) or kind in kinds
        violations.need(is_fine, f"{_FIELD}.{name}", getattr(asked, name), f"must be unset for {kind}")
    if asked.disable_any_whitespace and asked.whitespace_pattern:
        rule = "must be unset where disable_any_whitespace is true"
        violations.add(f"{_FIELD}.whitespace_pattern", asked.whitespace_pattern, rule)
    _check_nul(f"{_FIELD}.whitespace_pattern", asked.whitespace_pattern, violations)
    backends = (*model.ready.structured_output_backends, AUTO)
    is_known = not asked.backend or asked.backend in backends
    violations.need(is_known, f"{_FIELD}.backend", asked.backend, f"must be one of {', '.join(backends)}")
    starts = sampling_pb2.StructuredOutputStart
    violations.need_enum(f"{_FIELD}.start", asked.start, starts, starts.values())


def _check_nul(field: str, text: str, violations: Violations, *, index: int | None = None) -> None:
    violations.need("\0" not in text, field, text, "must not contain a NUL character", index=index)


def _shown(asked: sampling_pb2.StructuredOutput) -> str:
    return asked.WhichOneof("constraint") or ""


def _constraint_of(asked: sampling_pb2.StructuredOutput) -> Constraint:
    kind = asked.WhichOneof("constraint")
    assert kind is not None, "checked"
    return Constraint(
        ConstraintKind(kind),
        text=getattr(asked, kind) if kind in _TEXTS else "",
        choices=tuple(asked.choice.choices) if kind == "choice" else (),
        whitespace=Whitespace(not asked.disable_any_whitespace, asked.whitespace_pattern),
        has_additional_properties=not asked.disable_additional_properties,
    )


def _allowed_backends(name: str, model: ServedModel) -> tuple[str, ...]:
    """The engine's backends in the order of their preference, or the one that is asked for."""
    if name and name != AUTO:
        return (name,)
    return tuple(model.ready.structured_output_backends)


def _size(verdict: Verdict) -> int:
    text = verdict.text if isinstance(verdict, CheckedConstraint) else verdict[0]
    return _VERDICT_BYTES + len(text)
