"""A frontend in its process: connects, reports its status, drains and closes. Knows no single request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from frontend_svc.engines.connection.health import EngineState
from frontend_svc.generation.drain import shutting_down
from frontend_svc.parts import EngineParts, PublicAPI, RequestParts, Servers
from frontend_svc.ui.history import History
from frontend_svc.ui.state import StatePage
from triptych_kit import shared_memory
from triptych_kit.telemetry.metrics import Metrics

# Limit of the wait of `cut` for calls to end: a client that does not read must not delay the others.
_CALLS_END_S = 0.1
# Time to end for calls that the drain does not wait for.
_CALLS_GRACE_S = 0.5


class Frontend:
    """The parts of one frontend process, from the first connection to the last.

    engine_addresses: of engines that no coordinator announces.
    """

    def __init__(
        self,
        engine_addresses: Sequence[str],
        engines: EngineParts,
        requests: RequestParts,
        api: PublicAPI,
        servers: Servers,
        metrics: Metrics,
        state_page: StatePage,
        history: History,
    ) -> None:
        self.engines = engines
        self.requests = requests
        self.api = api
        self.servers = servers
        self.metrics = metrics
        self.address = ""
        self._engine_addresses = engine_addresses
        self._state_page = state_page
        self._history = history
        self._closing: asyncio.Task[None] | None = None

    def connect(self, address: str) -> None:
        """Start connecting to engines and coordinator; `address` is where this frontend listens."""
        if shared_memory.is_available():
            # Segments of frontends that were killed and that no engine has removed.
            shared_memory.sweep()
        self.address = self.requests.traces.address = address
        self.engines.directory.set_addresses("configuration", self._engine_addresses)
        if self.engines.coordinator is not None:
            self.engines.coordinator.start()
        self._history.start()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the open ones and for calls that read one."""
        await self.requests.draining.run()

    async def end_calls(self) -> None:
        """After a drain: refuse calls, and end open ones with a status that allows a retry elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALLS_GRACE_S + _CALLS_END_S):
                await self.servers.public.end_calls(shutting_down, grace_s=_CALLS_GRACE_S)

    async def cut(self) -> None:
        """End every call with a status that allows a retry elsewhere; leave resumable requests in engines."""
        calls = asyncio.ensure_future(self.servers.public.end_calls(shutting_down))
        await asyncio.wait({calls}, timeout=_CALLS_END_S)
        await asyncio.gather(self.close(), calls)

    async def close(self) -> None:
        """Close all streams. Requests of resumable streams are left in engines for other frontends."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        # A caller that is cancelled does not cancel the closing.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        engines, requests = self.engines, self.requests
        requests.loop_lag.stop()
        self._history.stop()
        await self._state_page.close()
        engines.directory.leave()
        await requests.resumable.close()
        engines.failover.close()
        engines.locks.close()
        if engines.coordinator is not None:
            await engines.coordinator.close()
        await engines.directory.close()
        await requests.text_workers.close()

    def status(self) -> dict[str, str | int | float]:
        """Facts and gauges for an operator."""
        requests, failover = self.requests, self.engines.failover
        clients, lag = self.engines.directory.clients(), requests.loop_lag.summary()
        values: dict[str, str | int | float] = {
            "state": "draining" if requests.draining.has_begun else "serving",
            "num_open_requests": requests.draining.num_open,
            "num_queued_requests": requests.admission.num_queued,
            "num_resumable_streams": len(requests.resumable),
            "num_engines": len(clients),
            "num_held_requests": failover.num_held,
            "num_moved_requests": failover.num_moved,
            "num_suspect_requests": failover.suspects.num_on_probation,
            "num_quarantined_requests": failover.num_quarantined,
            "retry_budget_left": round(failover.budget.left, 1),
            "num_text_workers": len(requests.text_workers.process_ids),
            "num_queued_texts": requests.text_workers.num_queued,
            "event_loop_lag_p50_ms": lag.p50_ms,
            "event_loop_lag_p99_ms": lag.p99_ms,
            "event_loop_lag_max_ms": lag.max_ms,
        }
        for client in clients:
            values[f"engine.{client.address}.state"] = client.state.value
            values[f"engine.{client.address}.num_in_flight"] = client.requests.num_in_flight
            values[f"engine.{client.address}.stale_outputs"] = client.requests.stale_outputs
            if client.down_reason and client.state is not EngineState.READY:
                values[f"engine.{client.address}.down_reason"] = client.down_reason
        return values
