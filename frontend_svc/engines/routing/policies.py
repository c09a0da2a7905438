"""Routing policies by name, and rules that apply under each: pinned ranks, paused engines, affinity keys."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from frontend_svc.engines.routing.affinity import favourite, prefix_affinity, with_slot
from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingPolicy, RoutingRequest
from frontend_svc.engines.routing.least_loaded import kv_aware, load, p2c, round_robin
from triptych_kit.plugins import find_offered

DEFAULT_POLICY = "kv-aware"
POLICIES: Mapping[str, RoutingPolicy] = MappingProxyType(
    {
        "kv-aware": kv_aware,
        "load": load,
        "p2c": p2c,
        "prefix-affinity": prefix_affinity,
        "round-robin": round_robin,
    }
)
_ENTRY_POINTS = "triptych.routing"
# A multiple of every number up to 16: turns that differ by it select the same one of up to 16 engines.
_ROUND = 720_720


def find_policy(name: str) -> RoutingPolicy:
    """The policy of this name: a built-in one, or one of an installed package's entry points.

    Raises ConfigError if there is none.
    """
    return find_offered(name, POLICIES, group=_ENTRY_POINTS, option="routing_policy")


def route(
    policy: RoutingPolicy, engines: Sequence[EngineInfo], request: RoutingRequest, turn: int
) -> EngineInfo | None:
    """The engine that gets `request`; None if no engine has its rank, or there are no engines.

    A pinned rank, an affinity key and a session take precedence over the policy, which chooses among the
    engines that have the request's variant in a slot. A paused engine gets requests only if all candidates
    are paused.
    """
    rank = request.data_parallel_rank
    candidates = [engine for engine in engines if rank is None or engine.dp_rank == rank]
    candidates = [engine for engine in candidates if not engine.is_held] or candidates
    if not candidates:
        return None
    if request.affinity_key:
        return favourite(candidates, request.affinity_key.encode())
    if request.session_id:
        return prefix_affinity(candidates, request, turn)
    return policy(with_slot(candidates, request), request, turn)


def first_turn(index: int, epoch: int) -> int:
    """A frontend's first turn. Frontends of one host have different indexes and start at different engines.

    `epoch` is random, so that random choices by turn differ between frontends.
    """
    return zlib.crc32(socket.gethostname().encode()) + index + _ROUND * (epoch % 2**32)
