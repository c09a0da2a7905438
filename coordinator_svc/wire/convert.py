"""Conversion between the coordinator's protos and its own types, with validation. Knows no sessions."""

from __future__ import annotations

import ipaddress
import math
import re

from coordinator_svc.data_parallel.formation import Abort, Commit, Order, Prepare
from coordinator_svc.data_parallel.ranks import Rank, RankReport
from coordinator_svc.data_parallel.wave import Start, WaveStatus
from coordinator_svc.membership.load import Load, LoadReport
from coordinator_svc.membership.registry import Member, MemberState, Registration
from coordinator_svc.wire.number_limits import excess
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2
from triptych_kit.addresses import UNIX
from triptych_kit.errors import InvalidArgument

_MAX_CHARACTERS = 128
# So that a snapshot of all members, with their loads, groups and frontends, fits into one message of 64 MiB.
_MAX_FACTS_BYTES = 15 * 1024
_MAX_DP_SIZE = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_MAX_NAME_LENGTH = 253
_MAX_ENDPOINT = _MAX_NAME_LENGTH + len(":65535")

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
    """The registration of an engine; raises InvalidArgument that names every wrong field."""
    violations = [
        (f"register.{field}", f"{field} {problem}")
        for field, problem in (
            ("engine_id", _wrong_name(message.engine_id, min_characters=1)),
            ("engine_epoch", "must not be 0" if message.engine_epoch == 0 else ""),
            ("endpoint", _wrong_endpoint(message.endpoint)),
            ("dp_size", _wrong_dp_size(message.dp_size)),
            ("dp_rank", _wrong_dp_rank(message)),
            ("dp_group", _wrong_name(message.dp_group)),
            ("parallel_config_hash", _wrong_name(message.parallel_config_hash)),
            ("capacity", _wrong_capacity(message)),
            ("host", _wrong_host(message.host)),
            ("store_port", _wrong_store_port(message)),
            ("wave", excess(message.wave)),
            ("labels", _wrong_size(message)),
        )
        if problem
    ]
    if violations:
        raise InvalidArgument("; ".join(text for _, text in violations), violations=violations)
    facts = member_pb2.EngineRegistration()
    facts.CopyFrom(message)
    facts.ClearField("highest_coordinator_epoch")
    return Registration(
        engine_id=message.engine_id,
        engine_epoch=message.engine_epoch,
        endpoint=message.endpoint,
        dp_group=message.dp_group,
        dp_rank=message.dp_rank,
        dp_size=max(message.dp_size, 1),
        is_lockstep=message.lockstep,
        parallel_config_hash=message.parallel_config_hash,
        num_kv_blocks=message.capacity.num_kv_blocks,
        facts=facts.SerializeToString(),
    )


def to_rank(message: member_pb2.EngineRegistration) -> Rank:
    """An engine of a lockstep group."""
    return Rank(
        engine_id=message.engine_id,
        engine_epoch=message.engine_epoch,
        dp_rank=message.dp_rank,
        dp_size=max(message.dp_size, 1),
        host=message.host or message.endpoint.rpartition(":")[0].strip("[]"),
        store_port=message.store_port,
    )


def check_frontend(message: coordinator_pb2.FrontendRegistration) -> None:
    """Raise InvalidArgument for a frontend's name or endpoint that must not be published."""
    for field, problem in (
        ("frontend_id", _wrong_name(message.frontend_id, min_characters=1)),
        ("endpoint", _wrong_name(message.endpoint, max_characters=_MAX_ENDPOINT)),
    ):
        if problem:
            raise InvalidArgument(f"{field} {problem}", field=f"register.{field}")


def to_state(report: coordinator_pb2.EngineReport, before: MemberState) -> MemberState:
    """The state in a report; `before` if it has none."""
    if report.state == member_pb2.MEMBER_STATE_UNSPECIFIED:
        return before
    if report.state not in _FROM_REPORT:
        raise InvalidArgument(
            f"an engine cannot report state {report.state}: LOADING, READY, DRAINING or FAILED",
            field="report.state",
        )
    return _FROM_REPORT[report.state]


def to_load_report(report: coordinator_pb2.EngineReport) -> LoadReport:
    """The load of a report with its position in the order."""
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


def to_wave_status(report: coordinator_pb2.EngineReport) -> WaveStatus:
    """The wave state in the report of an engine of a lockstep group."""
    return WaveStatus(
        wave=report.wave,
        is_running=not report.wave_complete and report.generation > 0,
        asks=report.start_wave_needed,
        is_apart=report.generation == 0,
    )


def to_rank_report(report: coordinator_pb2.EngineReport) -> RankReport:
    """The membership state in the report of an engine of a lockstep group."""
    is_ready = report.state == member_pb2.MEMBER_STATE_READY
    notice = report.scaling_notice.kind
    return RankReport(
        generation=report.generation,
        is_loaded=is_ready or notice == command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY,
        was_formed=is_ready,
        is_leaving=report.state == member_pb2.MEMBER_STATE_DRAINING,
    )


def to_membership_command(order: Order, parallel_config_hash: str) -> command_pb2.Command:
    """The command for an order about a lockstep group's membership."""
    command = command_pb2.Command()
    match order:
        case Prepare():
            command.prepare_scale.generation = order.generation
            command.prepare_scale.new_size = order.size
            if order.rank is None:
                command.prepare_scale.leave = True
            else:
                command.prepare_scale.rank = order.rank
                command.prepare_scale.rendezvous.CopyFrom(to_rendezvous(order, parallel_config_hash))
        case Commit():
            command.commit_scale.generation = order.generation
            command.commit_scale.lost_generation = order.lost_generation
        case Abort():
            command.abort_scale.generation = order.generation
    return command


def to_rendezvous(meeting: Prepare, parallel_config_hash: str) -> command_pb2.Rendezvous:
    """Where the ranks of a generation connect."""
    return command_pb2.Rendezvous(
        master_address=meeting.host,
        store_port=meeting.store_port,
        dp_size=meeting.size,
        generation=meeting.generation,
        parallel_config_hash=parallel_config_hash,
    )


def to_start_command(start: Start) -> command_pb2.Command:
    """The command that begins a wave."""
    return command_pb2.Command(start_wave=command_pb2.StartWave(wave=start.wave, exclude=list(start.exclude)))


def to_interval_command(interval_s: float) -> command_pb2.Command:
    """The command that sets how often an engine reports changes."""
    return command_pb2.Command(
        update_interval=command_pb2.UpdateInterval(interval_ms=math.ceil(interval_s * 1000))
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
    """A member as frontends get it: its state while its session is open, else UNREPORTED."""
    state = _TO_STATE[member.state] if member.is_reporting else member_pb2.MEMBER_STATE_UNREPORTED
    return member_pb2.EngineMember(
        registration=member_pb2.EngineRegistration.FromString(member.registration.facts),
        state=state,
        load=None if load is None else from_load(member.registration.engine_id, load),
    )


def _wrong_name(name: str, *, min_characters: int = 0, max_characters: int = _MAX_CHARACTERS) -> str:
    """Why a name may not be published and logged; "" if it may."""
    if not min_characters <= len(name) <= max_characters:
        return f"has {len(name)} characters, the range is {min_characters}..{max_characters}"
    return "" if name.isprintable() else "has characters that cannot be printed"


def _wrong_endpoint(endpoint: str) -> str:
    if endpoint.startswith(f"{UNIX}/"):
        return (
            ""
            if endpoint.isascii() and endpoint.isprintable()
            else f"{endpoint!r} is not the path of a socket"
        )
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
    """The IP address in `host`, IPv6 in brackets; None for anything else."""
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


def _wrong_host(host: str) -> str:
    """Why a host cannot be one that other ranks connect to; it may be empty, for the endpoint's host."""
    address = _address(f"[{host}]" if ":" in host else host)
    if not host or (address is None and _is_name(host)):
        return ""
    if address is None or address.is_unspecified or address.is_multicast:
        return f"{host!r} is not a name or an address of an engine"
    return ""


def _wrong_store_port(message: member_pb2.EngineRegistration) -> str:
    return f"is {message.store_port}, the range is 0..65535" if message.store_port > 65535 else ""


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
