"""Reads the job of an ADD."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from engine_svc.admin.served_engine import CallContext, Role, UtilityCall
from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.convert.messages import scoped_salt
from engine_svc.features.pins.extras import FinishHint, JobTurn, ListPins, PinInfo, PinPrefix, ReleasePins
from engine_svc.features.pins.options import POLICY
from triptych.engine.v1 import add_pb2, session_pb2, utility_pb2
from triptych_kit.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, ServiceError
from triptych_kit.field_checks import check
from triptych_kit.rules import MessageRules

_HINT_RULES = MessageRules(session_pb2.FinishHint)
_PIN_RULES = MessageRules(utility_pb2.PinBlocksCall)
_FAILURES: dict[str, type[ServiceError]] = {
    "FAILED_PRECONDITION": FailedPrecondition,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
}


def make(config: EngineConfig) -> WireFeature:
    return JobOfAdd(is_used=config.scheduling_policy == POLICY)


class JobOfAdd(WireFeature):
    """is_used: whether the policy serves jobs. Another takes the fields, without effect, and has no pins."""

    fields = ("job_id", "is_last_step", "tool_name")
    message = "finish_hint"

    def __init__(self, *, is_used: bool) -> None:
        self._is_used = is_used
        if is_used:
            self.utilities = (
                UtilityCall("pin_blocks", Role.ADMIN, _pin),
                UtilityCall("release_pins", Role.ADMIN, _release),
                UtilityCall("list_pins", Role.ADMIN, _list),
                UtilityCall("flush_pins", Role.ADMIN, _flush),
            )

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        if not self._is_used or not entry.job_id:
            return None
        turn = JobTurn(
            entry.is_last_step,
            entry.tool_name,
            has_siblings=bool(entry.group_id),
            job_id=entry.job_id,
            tenant=entry.tenant,
        )
        return Parsed(turn, job=job_key(entry.tenant, entry.job_id))

    def read(self, message: session_pb2.FinishHint) -> FinishHint:
        _check(_HINT_RULES, message)
        return FinishHint(message.tool_name if message.HasField("tool_name") else None)


def job_key(tenant: str, job_id: str) -> str:
    """The key of a job, which no other tenant's has."""
    return f"{len(tenant)}:{tenant}{job_id}"


async def _pin(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    """Pin blocks for an operator."""
    prefix = call.pin_blocks
    _check(_PIN_RULES, prefix, "pin_blocks.")
    limit, vocab_size = context.core.facts.max_model_len, context.core.facts.vocab_size
    check(len(prefix.token_ids) <= limit, "pin_blocks.token_ids", len(prefix.token_ids), f"{limit} at most")
    highest = max(prefix.token_ids)
    check(highest < vocab_size, "pin_blocks.token_ids", highest, f"below {vocab_size}")
    note = PinPrefix(
        list(prefix.token_ids),
        prefix.ttl_s,
        prefix.job_id,
        scoped_salt(prefix.tenant, prefix.cache_salt),
        prefix.tenant,
    )
    await context.ask(lambda controls: controls.note(note))
    if note.failure is not None:
        failure = note.failure
        metadata = {"fields": failure.field} if failure.field else None
        raise _FAILURES[failure.code](failure.message, metadata=metadata)
    return _pins([note.pin] if note.pin is not None else [])


async def _release(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    target = call.release_pins
    if not target.pin_id and not target.job_id:
        raise InvalidArgument("target is not set, it takes pin_id or job_id", field="release_pins.target")
    note = ReleasePins(target.pin_id, target.job_id)
    result = await _released(context, note)
    if not note.num_pins:
        name = (target.pin_id or target.job_id)[:80]
        raise NotFound(f"there is no pin {name!r}", resource_type="pin", resource_name=name)
    return result


async def _flush(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    return await _released(context, ReleasePins())


async def _list(context: CallContext, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
    note = ListPins()
    await context.ask(lambda controls: controls.note(note))
    return _pins(note.pins)


async def _released(context: CallContext, note: ReleasePins) -> utility_pb2.UtilityResult:
    await context.ask(lambda controls: controls.note(note))
    return utility_pb2.UtilityResult(num_released_blocks=note.num_blocks)


def _pins(pins: Iterable[PinInfo]) -> utility_pb2.UtilityResult:
    described = [
        utility_pb2.PinnedBlocks(
            pin_id=pin.pin_id,
            num_blocks=pin.num_blocks,
            remaining_ms=round(pin.left_s * 1000),
            job_id=pin.job_id,
            tenant=pin.tenant,
        )
        for pin in pins
    ]
    return utility_pb2.UtilityResult(pins=utility_pb2.Pins(pins=described))


def _check(rules: MessageRules, message: Message, prefix: str = "") -> None:
    """Raise InvalidArgument for a field that breaks a rule."""
    broken = rules.violations(message, {})
    if broken:
        raise InvalidArgument(broken[0].message, field=prefix + broken[0].field)
