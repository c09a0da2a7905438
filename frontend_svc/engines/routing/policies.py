"""Routing by names of policies, and what holds under each: pinned ranks, held engines, affinity keys."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from frontend_svc.engines.routing.affinity import favourite, prefix_affinity
from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingPolicy, RoutingRequest
from frontend_svc.engines.routing.least_loaded import kv_aware, load, p2c, round_robin
from service_kit.plugins import find_offered

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
# A multiple of every number up to 16, so that counts which differ by it begin at the same of so many engines.
_ROUND = 720_720


def find_policy(name: str) -> RoutingPolicy:
    """The policy of this name: one of ours, or of an installed package that offers it as an entry point.

    Raises ConfigError where there is none.
    """
    return find_offered(name, POLICIES, group=_ENTRY_POINTS, option="routing_policy")


def route(
    policy: RoutingPolicy, engines: Sequence[EngineInfo], request: RoutingRequest, turn: int
) -> EngineInfo | None:
    """The engine that gets `request`; None where none has its rank, or there is none at all.

    A pinned rank, an affinity key and a session go before the policy, and an engine that is held gets
    requests only where all are.
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
    return policy(candidates, request, turn)


def first_turn(index: int, epoch: int) -> int:
    """Where a frontend begins to count: those of one host, which have an index each, at different engines.

    `epoch` is random: what is drawn by turns must not be the same on two frontends.
    """
    return zlib.crc32(socket.gethostname().encode()) + index + _ROUND * (epoch % 2**32)
