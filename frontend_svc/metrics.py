"""The metrics of a frontend process besides those of requests. All are read from its parts when scraped."""

from __future__ import annotations

from collections.abc import Callable

from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.engines.directory import Directory
from frontend_svc.parts import EngineParts, RequestParts
from triptych_kit.telemetry.loop_lag import LAG_BUCKETS
from triptych_kit.telemetry.metrics import Metrics, Reading, Row
from triptych_kit.telemetry.traces import register_span_export

_REQUESTS: tuple[Row[RequestParts], ...] = (
    Row("gauge", "triptych_frontend_requests_open", lambda requests: requests.draining.num_open,
        "Requests that have not ended."),
    Row("gauge", "triptych_frontend_requests_queued", lambda requests: requests.admission.num_queued,
        "Requests without a first token, which admission limits."),
    Row("gauge", "triptych_frontend_resumable_streams", lambda requests: len(requests.resumable),
        "Streams that their clients can resume."),
    Row("gauge", "triptych_frontend_sessions_open", lambda requests: requests.sessions.values,
        "Open sessions: calls of GenerateSession, and WebSockets of /v1/realtime.", labels=("api",)),
    Row("gauge", "triptych_frontend_text_workers", lambda requests: len(requests.text_workers.process_ids),
        "Processes that tokenize and render chats."),
    Row("gauge", "triptych_frontend_texts_queued", lambda requests: requests.text_workers.num_queued,
        "Texts that wait for one of these processes."),
    Row("histogram", "triptych_frontend_event_loop_lag_seconds",
        lambda requests: {(): requests.loop_lag.distribution},
        "How late the event loop runs what is due, sampled every 10 ms while requests are open.",
        buckets=LAG_BUCKETS),
)  # fmt: skip

_ENGINES: tuple[Row[EngineParts], ...] = (
    Row("gauge", "triptych_frontend_requests_held", lambda engines: engines.failover.num_held,
        "Requests that wait for an engine."),
    Row("counter", "triptych_frontend_requests_moved_total", lambda engines: engines.failover.moves.values,
        "Requests that were sent to another engine, by what became of the one before.",
        labels=("cause",)),
    Row("gauge", "triptych_frontend_requests_suspect",
        lambda engines: engines.failover.suspects.num_on_probation,
        "Requests that may have crashed an engine and have no output from another one yet."),
    Row("counter", "triptych_frontend_requests_quarantined_total",
        lambda engines: engines.failover.num_quarantined,
        "Requests that were ended because engines failed while they ran."),
    Row("gauge", "triptych_frontend_retry_budget", lambda engines: engines.failover.budget.left,
        "Moves after losses that are left before requests are refused instead."),
    Row("gauge", "triptych_frontend_coordinator_connected", lambda engines: engines.has_coordinator,
        "Whether there is a session with the coordinator, 0 or 1."),
)  # fmt: skip


def _of_each(value: Callable[[EngineClient], float]) -> Callable[[Directory], Reading]:
    return lambda directory: {(client.address,): value(client) for client in directory.clients()}


def _states(directory: Directory) -> Reading:
    return {
        (client.address, state.value): client.state is state
        for client in directory.clients()
        for state in EngineState
    }


_ENGINE = ("engine",)
_CONNECTIONS: tuple[Row[Directory], ...] = (
    Row("gauge", "triptych_frontend_engine_state", _states,
        "1 for the state of the connection to an engine.", (*_ENGINE, "state")),
    Row("gauge", "triptych_frontend_engine_requests_in_flight",
        _of_each(lambda client: client.requests.num_in_flight),
        "Requests of this frontend that an engine has.", _ENGINE),
    Row("gauge", "triptych_frontend_engine_requests_running",
        _of_each(lambda client: client.requests.account.info().num_running),
        "Running requests of an engine, those of other frontends included, as routing knows it.", _ENGINE),
    Row("gauge", "triptych_frontend_engine_requests_waiting",
        _of_each(lambda client: client.requests.account.info().num_waiting),
        "Waiting requests of an engine, those of other frontends included, as routing knows it.", _ENGINE),
    Row("gauge", "triptych_frontend_engine_step_age_seconds", _of_each(lambda client: client.step_age_s),
        "Age of an engine's running step at its last heartbeat; 0 without one.", _ENGINE),
    Row("counter", "triptych_frontend_engine_heartbeats_total",
        _of_each(lambda client: client.num_heartbeats),
        "Heartbeats of an engine, of which two come in a second.", _ENGINE),
    Row("counter", "triptych_frontend_engine_streams_resumed_total",
        _of_each(lambda client: client.requests.num_resumed),
        "Streams that continued the session with an engine after one broke.", _ENGINE),
    Row("counter", "triptych_frontend_engine_stale_outputs_total",
        _of_each(lambda client: client.requests.stale_outputs),
        "Outputs of an engine for requests that had moved to another one.", _ENGINE),
)  # fmt: skip


def register_frontend(metrics: Metrics, engines: EngineParts, requests: RequestParts) -> None:
    """Register what every frontend has."""
    metrics.table(_REQUESTS, lambda: requests)
    metrics.table(_ENGINES, lambda: engines)
    metrics.table(_CONNECTIONS, lambda: engines.directory)
    register_span_export(metrics)
