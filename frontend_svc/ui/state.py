"""The page /ui/state: this frontend, its engines and their schedulers as JSON.

Each engine's scheduler is watched over a connection of its own, so that no stream of tokens waits behind it,
and only while the page is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc.aio

from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.parts import EngineParts, RequestParts
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_kit.addresses import unix_path
from triptych_kit.channel import open_channel
from triptych_kit.clock import Clock
from triptych_kit.http.pages import Page
from triptych_kit.version import installed_version

logger = logging.getLogger(__name__)

_REQUEST = admin_pb2.WatchSchedulerRequest(interval_ms=100, max_requests=512, max_blocks=16_384)
_MAX_STEPS = 120
_MAX_WATCHES = 64
# Time without a reader after which the watches end.
_IDLE_S = 5.0
# How long an answer waits for the first message of an engine.
_FIRST_S = 0.5
# From the begin of a watch that has ended to that of the next.
_RETRY_S = 1.0
_WATCHED_STATES = frozenset({EngineState.READY, EngineState.DRAINING})


class EngineWatch:
    """The newest state of one engine's scheduler, and its last steps, from one stream."""

    def __init__(self, address: str, clock: Clock) -> None:
        self.newest: admin_pb2.WatchSchedulerResponse | None = None
        self.received_at = 0.0
        self.steps: deque[admin_pb2.ScheduledStep] = deque(maxlen=_MAX_STEPS)
        self.began_at = clock.now()
        self.is_answered = asyncio.Event()  # a message has come, or none will
        self._address = address
        self._clock = clock
        self._task = asyncio.ensure_future(self._run())

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def end(self) -> asyncio.Future[None]:
        """End the stream; the result is its task."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        try:
            async with open_channel(self._address) as channel:
                call = admin_pb2_grpc.AdminServiceStub(channel).WatchScheduler(_REQUEST)
                async for message in call:
                    self.newest, self.received_at = message, self._clock.now()
                    self.steps.extend(message.steps)
                    self.is_answered.set()
        except grpc.aio.AioRpcError as error:
            logger.debug(
                "watch of the scheduler ended", extra={"engine": self._address, "reason": error.details()}
            )
        finally:
            self.is_answered.set()


class StatePage:
    """Makes the page. Watches of engines begin with the first request, and end without one for `idle_s`."""

    def __init__(
        self, engines: EngineParts, requests: RequestParts, clock: Clock, *, idle_s: float = _IDLE_S
    ) -> None:
        self._engines = engines
        self._requests = requests
        self._clock = clock
        self._idle_s = idle_s
        self._watches: dict[str, EngineWatch] = {}
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def make(self, target: str) -> Page:
        """The page; waits for an engine's first message, but not for long."""
        self._asked_at = self._clock.now()
        self._begin()
        until = max((watch.began_at for watch in self._watches.values()), default=0.0) + _FIRST_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock.now())):
                for watch in list(self._watches.values()):
                    await watch.is_answered.wait()
        return Page(json.dumps(self._state(), separators=(",", ":")).encode(), "application/json")

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        ended = [watch.end() for watch in self._watches.values()]
        self._watches.clear()
        await asyncio.gather(*ended, return_exceptions=True)

    def _begin(self) -> None:
        """Watch the engines that are not watched yet, or not any more."""
        self._end_lost()
        now = self._clock.now()
        for client in self._engines.directory.clients()[:_MAX_WATCHES]:
            watch = self._watches.get(client.address)
            is_due = watch is None or (watch.has_ended and now - watch.began_at >= _RETRY_S)
            if is_due and client.state in _WATCHED_STATES:
                self._watches[client.address] = EngineWatch(client.address, self._clock)
        if self._timer is None and self._watches:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s / 5, self._end_unwanted)

    def _end_unwanted(self) -> None:
        self._timer = None
        if self._clock.now() - self._asked_at >= self._idle_s:
            while self._watches:
                self._watches.popitem()[1].end()
        self._end_lost()
        if self._watches:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s / 5, self._end_unwanted)

    def _end_lost(self) -> None:
        """End the watches of engines without a connection."""
        connected = {
            client.address
            for client in self._engines.directory.clients()
            if client.state in _WATCHED_STATES or client.state is EngineState.RECONNECTING
        }
        for address in self._watches.keys() - connected:
            self._watches.pop(address).end()

    def _state(self) -> dict[str, Any]:
        engines, requests = self._engines, self._requests
        clients = {client.address: client for client in engines.directory.clients()}
        names = engine_names(clients)
        return {
            "at_ms": round(time.time() * 1000),
            "version": installed_version(),
            "frontend": {
                "open": requests.draining.num_open,
                "queued": requests.admission.num_queued,
                "held": engines.failover.num_held,
            },
            "coordinator": {"connected": engines.has_coordinator},
            "engines": [{"name": name, **self._engine(clients[address])} for address, name in names.items()],
        }

    def _engine(self, client: EngineClient) -> dict[str, Any]:
        info = client.requests.account.info()
        head = {
            "address": client.address,
            "engine_id": client.engine_id,
            "model": "" if client.model is None else client.model.name,
            "state": client.state.value,
            "rank": info.dp_rank if client.dp_size > 1 else None,
            "wave": self._engines.wave_of(client.engine_id),
        }
        watch = self._watches.get(client.address)
        if watch is None or watch.newest is None:
            # As routing knows it.
            return head | {
                "age_ms": None,
                "running": info.num_running,
                "waiting": info.num_waiting,
                "free_blocks": info.num_total_blocks - info.num_used_blocks,
                "total_blocks": info.num_total_blocks,
                "pins": 0,
                "pinned_blocks": 0,
                "prefix_hit_rate": None,
                "preemptions": 0,
                "prompt_tokens": 0,
                "generated_tokens": 0,
                "steps": [],
                "requests": [],
                "cached_blocks": [],
            }
        newest, stats = watch.newest, watch.newest.stats
        return head | {
            "age_ms": round((self._clock.now() - watch.received_at) * 1000),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "free_blocks": stats.num_total_blocks - stats.num_used_blocks,
            "total_blocks": stats.num_total_blocks,
            "pins": stats.num_pins,
            "pinned_blocks": stats.num_pinned_blocks,
            "prefix_hit_rate": (
                stats.num_prefix_hits / stats.num_prefix_queries if stats.num_prefix_queries else None
            ),
            "preemptions": stats.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "generated_tokens": stats.num_generated_tokens,
            "steps": [
                {
                    "step": step.step_number,
                    "num_tokens": step.num_tokens,
                    "num_requests": step.num_requests,
                    "duration_ms": round(step.duration_ms, 3),
                }
                for step in watch.steps
            ],
            "requests": list(map(_request, newest.requests)),
            "cached_blocks": list(newest.cached_block_ids),
        }


def engine_names(addresses: Iterable[str]) -> dict[str, str]:
    """A name for each address, in the order of names and their numbers.

    That of its socket, as `triptych admin` has it, where only one has it.
    """
    names = {
        address: address if (path := unix_path(address)) is None else Path(path).stem for address in addresses
    }
    num_uses = Counter(names.values())
    unique = {address: name if num_uses[name] == 1 else address for address, name in names.items()}
    return dict(sorted(unique.items(), key=lambda item: _numbered(item[1])))


def _numbered(name: str) -> list[str | int]:
    """A key of order: `engine-10` is behind `engine-2`. Texts and numbers alternate."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _request(request: admin_pb2.ScheduledRequest) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "status": request.status,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_preemptions": request.num_preemptions,
        "priority": request.priority,
        "age_ms": request.age_ms,
        "blockers": list(request.blockers),
        "blocks": list(request.block_ids),
    }
