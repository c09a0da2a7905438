"""The metrics of a coordinator. All of them are read from its state when they are scraped."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from coordinator_svc.data_parallel.lockstep_groups import LockstepGroup
from coordinator_svc.membership.registry import EngineRegistry, MemberState
from coordinator_svc.membership.topology import Topology
from coordinator_svc.scaling.operation import OperationState
from coordinator_svc.scaling.scaling import Scaling
from triptych_kit.telemetry.metrics import Metrics, Reading
from triptych_kit.telemetry.traces import register_span_export

# A member that is gone is no member.
_STATES = [state for state in MemberState if state is not MemberState.GONE]


def coordinator_metrics(registry: EngineRegistry, topology: Topology, scaling: Scaling) -> Metrics:
    """Each metric, registered."""
    metrics = Metrics("coordinator")
    register_span_export(metrics)
    metrics.gauge(
        "triptych_coordinator_engines",
        "Engines that are members, by state.",
        lambda: _by_state(_STATES, [member.state for member in registry.members()]),
        labels=("state",),
    )
    metrics.gauge(
        "triptych_coordinator_engines_unreported",
        "Members whose session is lost and whose lease still runs.",
        lambda: sum(not member.is_reporting for member in registry.members()),
    )
    metrics.gauge(
        "triptych_coordinator_engine_lease_left_seconds",
        "Time until an engine's lease ends, which each of its reports renews.",
        lambda: {(engine_id,): left_s for engine_id, left_s in registry.leases_left_s().items()},
        labels=("engine_id",),
    )
    metrics.gauge(
        "triptych_coordinator_frontends",
        "Frontends that have a session.",
        lambda: len(topology.frontends),
    )
    metrics.counter(
        "triptych_coordinator_member_changes_total",
        "Visible changes of members: registrations, changes of state, departures.",
        lambda: topology.members_version - 1,
    )
    metrics.counter(
        "triptych_coordinator_leases_expired_total",
        "Engines that were forgotten because their lease ended.",
        lambda: registry.num_expired,
    )
    metrics.counter(
        "triptych_coordinator_stale_reports_total",
        "Load reports that were dropped because a newer one had arrived.",
        lambda: topology.num_stale_reports,
    )
    metrics.counter(
        "triptych_coordinator_stale_sessions_refused_total",
        "Sessions refused because the peer knows a newer coordinator.",
        lambda: topology.epoch_check.num_refused,
    )
    metrics.gauge(
        "triptych_coordinator_commands_outstanding",
        "Commands to engines that are not answered yet.",
        lambda: topology.commands.num_outstanding,
    )
    metrics.counter(
        "triptych_coordinator_commands_refused_total",
        "Commands that engines refused.",
        lambda: topology.commands.num_refused,
    )

    def of_groups(value: Callable[[LockstepGroup], float]) -> Callable[[], Reading]:
        return lambda: {(group.name,): value(group) for group in topology.groups.present()}

    in_groups = functools.partial(metrics.gauge, labels=("dp_group",))
    in_groups(
        "triptych_coordinator_group_wave",
        "Number of the wave of a lockstep group that runs or comes next.",
        of_groups(lambda group: group.wave.number),
    )
    in_groups(
        "triptych_coordinator_group_wave_running",
        "Whether a wave of a lockstep group runs, 0 or 1.",
        of_groups(lambda group: group.wave.is_running),
    )
    in_groups(
        "triptych_coordinator_group_generation",
        "Generation of a lockstep group.",
        of_groups(lambda group: group.formation.generation),
    )
    in_groups(
        "triptych_coordinator_group_engines",
        "Engines in the present generation of a lockstep group.",
        of_groups(lambda group: len(group.formation.members)),
    )
    in_groups(
        "triptych_coordinator_group_engines_wanted",
        "Engines that a lockstep group is to have.",
        of_groups(lambda group: group.formation.target_size),
    )
    metrics.gauge(
        "triptych_coordinator_scaling_operations",
        "Changes of the number of engines that are remembered, by state.",
        lambda: _by_state(OperationState, [operation.state for operation in scaling.operations()]),
        labels=("state",),
    )
    return metrics


def _by_state(states: Iterable[Enum], present: Iterable[Enum]) -> Reading:
    counts = Counter(present)
    return {(state.value,): counts[state] for state in states}
