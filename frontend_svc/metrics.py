"""The metrics of a frontend process beside those of requests. All are read from its objects when scraped."""

from __future__ import annotations

from collections.abc import Callable

from frontend_svc.engines.connection.client import EngineClient, EngineState
from frontend_svc.engines.directory import Directory
from frontend_svc.parts import EngineParts, RequestParts
from frontend_svc.text.workers.verdicts import CHECK_BUCKETS
from triptych_kit.telemetry.loop_lag import LAG_BUCKETS
from triptych_kit.telemetry.metrics import Metrics, Reading


def register_frontend(metrics: Metrics, engines: EngineParts, requests: RequestParts) -> None:
    """Register what every frontend has."""
    failover = engines.failover
    metrics.gauge(
        "triptych_frontend_requests_open",
        "Requests that have not ended.",
        lambda: requests.draining.num_open,
    )
    metrics.gauge(
        "triptych_frontend_requests_queued",
        "Requests without a first token, which admission limits.",
        lambda: requests.admission.num_queued,
    )
    metrics.gauge(
        "triptych_frontend_requests_held",
        "Requests that wait for an engine.",
        lambda: failover.num_held,
    )
    metrics.gauge(
        "triptych_frontend_resumable_streams",
        "Streams that their clients can resume.",
        lambda: len(requests.resumable),
    )
    verdicts = requests.text_workers.verdicts
    metrics.counter(
        "triptych_frontend_constraint_checks_total",
        "Checks of constraints in text workers, by outcome: too_complex exceeded a limit, failed says "
        "nothing of the constraint.",
        lambda: verdicts.outcomes.values,
        labels=("outcome",),
    )
    metrics.counter(
        "triptych_frontend_constraint_cache_hits_total",
        "Constraints of requests that had been checked before, or were being checked.",
        lambda: verdicts.num_known,
    )
    metrics.distribution(
        "triptych_frontend_constraint_check_seconds",
        "Time to check a constraint in a text worker, with the wait for one.",
        CHECK_BUCKETS,
        lambda: {(): verdicts.check_s},
    )
    metrics.counter(
        "triptych_frontend_requests_moved_total",
        "Requests that were sent to another engine, by what became of the one before.",
        lambda: failover.moves.values,
        labels=("cause",),
    )
    metrics.gauge(
        "triptych_frontend_requests_suspect",
        "Requests that may have crashed an engine and have no output from another one yet.",
        lambda: failover.suspects.num_on_probation,
    )
    metrics.counter(
        "triptych_frontend_requests_quarantined_total",
        "Requests that were ended because engines failed while they ran.",
        lambda: failover.num_quarantined,
    )
    metrics.gauge(
        "triptych_frontend_retry_budget",
        "Moves after losses that are left before requests are refused instead.",
        lambda: failover.budget.left,
    )
    metrics.gauge(
        "triptych_frontend_text_workers",
        "Processes that tokenize and render chats.",
        lambda: len(requests.text_workers.process_ids),
    )
    metrics.gauge(
        "triptych_frontend_texts_queued",
        "Texts that wait for one of these processes.",
        lambda: requests.text_workers.num_queued,
    )
    metrics.distribution(
        "triptych_frontend_event_loop_lag_seconds",
        "How late the event loop runs what is due, sampled every 10 ms while requests are open.",
        LAG_BUCKETS,
        lambda: {(): requests.loop_lag.distribution},
    )
    metrics.gauge(
        "triptych_frontend_coordinator_connected",
        "Whether there is a session with the coordinator, 0 or 1.",
        lambda: engines.has_coordinator,
    )
    _register_engines(metrics, engines.directory)


def _register_engines(metrics: Metrics, directory: Directory) -> None:
    def of_each(value: Callable[[EngineClient], float]) -> Callable[[], Reading]:
        return lambda: {(client.address,): value(client) for client in directory.clients()}

    labels = ("engine",)
    metrics.gauge(
        "triptych_frontend_engine_state",
        "1 for the state of the connection to an engine.",
        lambda: {
            (client.address, state.value): client.state is state
            for client in directory.clients()
            for state in EngineState
        },
        labels=(*labels, "state"),
    )
    metrics.gauge(
        "triptych_frontend_engine_requests_in_flight",
        "Requests of this frontend that an engine has.",
        of_each(lambda client: client.requests.num_in_flight),
        labels=labels,
    )
    metrics.gauge(
        "triptych_frontend_engine_requests_running",
        "Running requests of an engine, those of other frontends included, as routing knows it.",
        of_each(lambda client: client.requests.account.info().num_running),
        labels=labels,
    )
    metrics.gauge(
        "triptych_frontend_engine_requests_waiting",
        "Waiting requests of an engine, those of other frontends included, as routing knows it.",
        of_each(lambda client: client.requests.account.info().num_waiting),
        labels=labels,
    )
    metrics.gauge(
        "triptych_frontend_engine_step_age_seconds",
        "Age of an engine's running step at its last heartbeat; 0 without one.",
        of_each(lambda client: client.step_age_s),
        labels=labels,
    )
    metrics.counter(
        "triptych_frontend_engine_heartbeats_total",
        "Heartbeats of an engine, of which two come in a second.",
        of_each(lambda client: client.num_heartbeats),
        labels=labels,
    )
    metrics.counter(
        "triptych_frontend_engine_streams_resumed_total",
        "Streams that continued the session with an engine after one broke.",
        of_each(lambda client: client.requests.num_resumed),
        labels=labels,
    )
    metrics.counter(
        "triptych_frontend_engine_stale_outputs_total",
        "Outputs of an engine for requests that had moved to another one.",
        of_each(lambda client: client.requests.stale_outputs),
        labels=labels,
    )
