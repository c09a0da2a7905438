"""Policies that go by how much there is to do at each engine, and those that do not look at it at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest

# A request that waits says more about the next one's fate than one that runs.
_WAITING_WEIGHT = 4
# A request takes its part of every step: about as much as so many tokens of a prompt, once.
_REQUEST_TOKENS = 64
# From this share of used blocks on requests are likely to wait for some, or to lose those they have.
_SCARCE_USAGE = 0.8
_SCARCE_WEIGHT = 4
# So many engines are compared, whoever else sends there.
_MIN_COMPARED = 4


def round_robin(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """Each engine in turn, whatever it has to do."""
    return engines[turn % len(engines)]


def load(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The fewest requests, those that wait counted four times; among equals the fewest of ours.

    Compares as many engines as `kv_aware`.
    """
    return least(_compared(engines, turn), _load, turn)


def kv_aware(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The least work before this request's first token: queued prompt tokens, requests, scarce blocks.

    Compares all engines where all requests are ours, and the fewer the more are others'.
    """
    compared = _compared(engines, turn)
    return least(compared, lambda engine: (work(engine, request), engine.num_in_flight), turn)


def p2c(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The one with less work of two that are drawn by `turn`: no herd, and no look at all of the others."""
    if len(engines) == 1:
        return engines[0]
    return min(_drawn(engines, 2, turn), key=lambda engine: work(engine, request))


def work(engine: EngineInfo, request: RoutingRequest) -> float:
    """How much `engine` has to do before and beside `request`, in tokens. Never 0: ratios can be told.

    The tokens that are queued, and a fixed part for each request, `request` among them; up to five times as
    much where it leaves few free blocks.
    """
    tokens = engine.num_queued_tokens + _REQUEST_TOKENS * (engine.num_requests + request.num_requests)
    return tokens * (1 + _SCARCE_WEIGHT * _scarcity(engine, request))


def least(engines: Sequence[EngineInfo], cost: Callable[[EngineInfo], object], turn: int) -> EngineInfo:
    """The engine of least cost; equals take turns."""
    costs = [cost(engine) for engine in engines]
    lowest = min(costs)  # type: ignore[type-var]  # costs of one policy are of one kind
    equals = [engine for engine, one in zip(engines, costs, strict=True) if one == lowest]
    return equals[turn % len(equals)]


def _compared(engines: Sequence[EngineInfo], turn: int) -> Sequence[EngineInfo]:
    """The engines to choose among: all, or as many drawn ones as our part of the requests says.

    What other frontends send is not known before the next report: if all of them chose the least loaded of
    all, it would get everything until then.
    """
    num_requests = sum(engine.num_requests for engine in engines)
    num_ours = sum(engine.num_in_flight for engine in engines)
    num_compared = max(_MIN_COMPARED, round(len(engines) * num_ours / max(1, num_requests)))
    if not num_requests or num_compared >= len(engines):
        return engines
    return _drawn(engines, num_compared, turn)


def _drawn(engines: Sequence[EngineInfo], num_drawn: int, turn: int) -> list[EngineInfo]:
    """So many of two or more engines, each as likely as any other; the first two are two."""
    draw = int.from_bytes(hashlib.blake2b(turn.to_bytes(8, "little"), digest_size=8).digest(), "little")
    first, step = draw % len(engines), 1 + (draw >> 32) % (len(engines) - 1)
    return [engines[(first + index * step) % len(engines)] for index in range(num_drawn)]


def _load(engine: EngineInfo) -> tuple[int, int]:
    waiting = engine.num_waiting + engine.num_unreported
    return _WAITING_WEIGHT * waiting + engine.num_running, engine.num_in_flight


def _scarcity(engine: EngineInfo, request: RoutingRequest) -> float:
    """0 where there are plenty of free blocks for what is queued and for `request`, 1 where none is left."""
    if not engine.num_total_blocks:
        return 0.0
    num_blocks = engine.num_used_blocks
    if engine.block_size:
        num_tokens = engine.num_queued_tokens + request.num_prompt_tokens
        num_blocks += -(-num_tokens // engine.block_size)
    usage = num_blocks / engine.num_total_blocks
    return min(1.0, max(0.0, (usage - _SCARCE_USAGE) / (1 - _SCARCE_USAGE)))
