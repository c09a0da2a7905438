"""Routing policies by load, and round robin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest

# A waiting request predicts the next one's wait better than a running request does.
_WAITING_WEIGHT = 4
# Prompt tokens that cost about as much as a running request, which has a share of every step.
_REQUEST_TOKENS = 64
# Above this share of used blocks, requests are likely to wait for blocks or to be preempted.
_SCARCE_USAGE = 0.8
_SCARCE_WEIGHT = 4
# Number of engines that are compared even if other frontends send most requests.
_MIN_COMPARED = 4


def round_robin(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """Each engine in turn, regardless of load."""
    return engines[turn % len(engines)]


def load(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The fewest requests, where a waiting request counts four times; among equals the fewest own requests.

    Compares as many engines as `kv_aware`.
    """
    return least(_compared(engines, turn), _load, turn)


def kv_aware(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The least work before this request's first token: queued prompt tokens, requests, scarce blocks.

    Compares all engines if all requests are this frontend's, and the fewer the more other frontends send.
    """
    compared = _compared(engines, turn)
    return least(compared, lambda engine: (work(engine, request), engine.num_in_flight), turn)


def p2c(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """Power of two choices: the one with less work of two engines drawn by `turn`. Avoids herding."""
    if len(engines) == 1:
        return engines[0]
    return min(_drawn(engines, 2, turn), key=lambda engine: work(engine, request))


def work(engine: EngineInfo, request: RoutingRequest) -> float:
    """The engine's work before and beside `request`, in tokens. Never 0, so that ratios are defined.

    The queued tokens, plus a fixed amount for each request including `request`; up to five times as much if
    few blocks would stay free.
    """
    tokens = engine.num_queued_tokens + _REQUEST_TOKENS * (engine.num_requests + request.num_requests)
    return tokens * (1 + _SCARCE_WEIGHT * _scarcity(engine, request))


def least(engines: Sequence[EngineInfo], cost: Callable[[EngineInfo], object], turn: int) -> EngineInfo:
    """The engine of least cost; equal engines take turns."""
    costs = [cost(engine) for engine in engines]
    lowest = min(costs)  # type: ignore[type-var]  # costs of one policy are of one kind
    equals = [engine for engine, one in zip(engines, costs, strict=True) if one == lowest]
    return equals[turn % len(equals)]


def _compared(engines: Sequence[EngineInfo], turn: int) -> Sequence[EngineInfo]:
    """The engines to choose among: all, or a random subset in proportion to the share of own requests.

    Requests of other frontends are unknown until the next report: if every frontend chose the least loaded
    engine, it would get all requests until then.
    """
    num_requests = sum(engine.num_requests for engine in engines)
    num_ours = sum(engine.num_in_flight for engine in engines)
    num_compared = max(_MIN_COMPARED, round(len(engines) * num_ours / max(1, num_requests)))
    if not num_requests or num_compared >= len(engines):
        return engines
    return _drawn(engines, num_compared, turn)


def _drawn(engines: Sequence[EngineInfo], num_drawn: int, turn: int) -> list[EngineInfo]:
    """A uniform choice of `num_drawn` from two or more engines; the first two are distinct."""
    draw = int.from_bytes(hashlib.blake2b(turn.to_bytes(8, "little"), digest_size=8).digest(), "little")
    first, step = draw % len(engines), 1 + (draw >> 32) % (len(engines) - 1)
    return [engines[(first + index * step) % len(engines)] for index in range(num_drawn)]


def _load(engine: EngineInfo) -> tuple[int, int]:
    waiting = engine.num_waiting + engine.num_unreported
    return _WAITING_WEIGHT * waiting + engine.num_running, engine.num_in_flight


def _scarcity(engine: EngineInfo, request: RoutingRequest) -> float:
    """0 if there are enough free blocks for the queued requests and `request`, 1 if none would be left."""
    if not engine.num_total_blocks:
        return 0.0
    num_blocks = engine.num_used_blocks
    if engine.block_size:
        num_tokens = engine.num_queued_tokens + request.num_prompt_tokens
        num_blocks += -(-num_tokens // engine.block_size)
    usage = num_blocks / engine.num_total_blocks
    return min(1.0, max(0.0, (usage - _SCARCE_USAGE) / (1 - _SCARCE_USAGE)))
