"""Between the coordinator's protos and its own types; checks what comes in. Knows no sessions."""

from __future__ import annotations

import ipaddress
import re

from coordinator_svc.load import Load, LoadReport
from coordinator_svc.registry import Member, MemberState, Registration
from service_kit.errors import InvalidArgument
from triptych.coordinator.v1 import coordinator_pb2, member_pb2

_MAX_ID_LENGTH = 128
# So that a snapshot of all members fits into one message.
_MAX_FACTS_BYTES = 16 * 1024
_MAX_DP_SIZE = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_MAX_NAME_LENGTH = 253

_FROM_REPORT = {
    member_pb2.MEMBER_STATE_LOADING: MemberState.JOINING,
    member_pb2.MEMBER_STATE_READY: MemberState.READY,
    member_pb2.MEMBER_STATE_DRAINING: MemberState.DRAINING,
    member_pb2.MEMBER_STATE_FAILED: MemberState.GONE,
}

_TO_STATE = {
    MemberState.JOINING: member_pb2.MEMBER_STATE_LOADING,
    MemberState.READY: member_pb2.MEMBER_STATE_READY,
    MemberState.DRAINING: member_pb2.MEMBER_STATE_DRAINING,
    MemberState.GONE: member_pb2.MEMBER_STATE_GONE,
}


def to_registration(message: member_pb2.EngineRegistration) -> Registration:
    """The registration of an engine; raises InvalidArgument naming every field that is wrong."""
    violations = [
        (f"register.{field}", f"{field} {problem}")
        for field, problem in (
            ("engine_id", _wrong_id(message.engine_id)),
            ("engine_epoch", "must not be 0" if message.engine_epoch == 0 else ""),
            ("endpoint", _wrong_endpoint(message.endpoint)),
            ("dp_size", _wrong_dp_size(message.dp_size)),
            ("dp_rank", _wrong_dp_rank(message)),
            ("capacity", _wrong_capacity(message)),
            ("labels", _wrong_size(message)),
        )
        if problem
    ]
    if violations:
        raise InvalidArgument("; ".join(text for _, text in violations), violations=violations)
    return Registration(
        engine_id=message.engine_id,
        engine_epoch=message.engine_epoch,
        endpoint=message.endpoint,
        dp_group=message.dp_group,
        dp_rank=message.dp_rank,
        dp_size=max(message.dp_size, 1),
        facts=message.SerializeToString(),
    )


def check_frontend(message: coordinator_pb2.FrontendRegistration) -> None:
    """Raise InvalidArgument if a frontend cannot be told from others by its id."""
    problem = _wrong_id(message.frontend_id)
    if problem:
        raise InvalidArgument(f"frontend_id {problem}", field="register.frontend_id")


def to_state(report: coordinator_pb2.EngineReport, before: MemberState) -> MemberState:
    """The state a report tells; the one before if it tells none."""
    if report.state == member_pb2.MEMBER_STATE_UNSPECIFIED:
        return before
    if report.state not in _FROM_REPORT:
        raise InvalidArgument(
            f"an engine cannot report state {report.state}: LOADING, READY, DRAINING or FAILED",
            field="report.state",
        )
    return _FROM_REPORT[report.state]


def to_load_report(report: coordinator_pb2.EngineReport) -> LoadReport:
    """The load of a report with its place in the order."""
    load = report.load
    return LoadReport(
        engine_epoch=load.engine_epoch,
        seq=report.seq,
        step_number=load.step_number,
        load=Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            num_used_blocks=min(load.num_used_blocks, load.num_total_blocks),
            num_total_blocks=load.num_total_blocks,
        ),
    )


def from_load(engine_id: str, report: LoadReport) -> member_pb2.EngineLoad:
    """The load of an engine as frontends get it."""
    return member_pb2.EngineLoad(
        engine_id=engine_id,
        engine_epoch=report.engine_epoch,
        step_number=report.step_number,
        num_running=report.load.num_running,
        num_waiting=report.load.num_waiting,
        num_waiting_tokens=report.load.num_waiting_tokens,
        num_used_blocks=report.load.num_used_blocks,
        num_total_blocks=report.load.num_total_blocks,
    )


def from_member(member: Member, load: LoadReport | None) -> member_pb2.EngineMember:
    """A member as frontends get it: an open session shows its state, a lost one UNREPORTED."""
    state = _TO_STATE[member.state] if member.is_reporting else member_pb2.MEMBER_STATE_UNREPORTED
    return member_pb2.EngineMember(
        registration=member_pb2.EngineRegistration.FromString(member.registration.facts),
        state=state,
        load=None if load is None else from_load(member.registration.engine_id, load),
    )


def _wrong_id(engine_id: str) -> str:
    if 0 < len(engine_id) <= _MAX_ID_LENGTH:
        return ""
    return f"has {len(engine_id)} characters, the range is 1..{_MAX_ID_LENGTH}"


def _wrong_endpoint(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return f"{endpoint!r} is not host:port"
    address = _address(host)
    if host == "*" or (address is not None and address.is_unspecified):
        return f"{endpoint!r} is a wildcard, frontends cannot dial it: advertise an address"
    if address is None:
        return "" if _is_name(host) else f"{endpoint!r} is not host:port"
    if address.is_link_local or address.is_multicast:
        return f"{endpoint!r} is not an address of an engine"
    return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that is written there, an IPv6 one in brackets; None for anything else."""
    try:
        if not (host.startswith("[") and host.endswith("]")):
            return ipaddress.IPv4Address(host)
        address = ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return None
    return address.ipv4_mapped or address


def _is_name(host: str) -> bool:
    # Resolvers read a last label of digits as an address: "0" and "00.0.0.0" are wildcards.
    return bool(_NAME.fullmatch(host)) and len(host) <= _MAX_NAME_LENGTH and not host.split(".")[-1].isdigit()


def _wrong_dp_size(dp_size: int) -> str:
    return f"is {dp_size}, the range is 1..{_MAX_DP_SIZE}" if dp_size > _MAX_DP_SIZE else ""


def _wrong_dp_rank(message: member_pb2.EngineRegistration) -> str:
    dp_size = max(message.dp_size, 1)
    return f"is {message.dp_rank}, the group has {dp_size}" if message.dp_rank >= dp_size else ""


def _wrong_size(message: member_pb2.EngineRegistration) -> str:
    size_bytes = message.ByteSize()
    if size_bytes <= _MAX_FACTS_BYTES:
        return ""
    return f"and the other facts have {size_bytes} bytes, the limit is {_MAX_FACTS_BYTES}"


def _wrong_capacity(message: member_pb2.EngineRegistration) -> str:
    if not message.HasField("capacity"):
        return ""
    capacity = message.capacity
    values = (capacity.num_kv_blocks, capacity.block_size, capacity.max_num_seqs, capacity.max_model_len)
    return "has a 0 where an engine needs at least 1" if 0 in values else ""
