"""Writes the dashboards of deploy/grafana: `python tools/dashboards.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards"
# Whichever Prometheus the reader selects; the provisioned one is the default.
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _PER_LINE = 8, 8, 3
_TOKENS, _TOKEN_RATE = "suffix: tokens", "suffix: tokens/s"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. queries: expressions of Prometheus by legend, in which {{label}} is the label's value."""

    title: str
    unit: str
    description: str
    queries: Mapping[str, str]
    has_exemplars: bool = False


def _rate(metric: str, by: str = "") -> str:
    return f"sum by ({by}) ({_each_rate(metric)})" if by else f"sum({_each_rate(metric)})"


def _each_rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


def _quantiles(histogram: str, shares: tuple[int, ...] = (50, 95, 99)) -> dict[str, str]:
    """Percentiles over all instances."""
    name, braces, matchers = histogram.partition("{")
    buckets = _rate(f"{name}_bucket{braces}{matchers}", "le")
    return {f"p{share}": f"histogram_quantile({share / 100:g}, {buckets})" for share in shares}


_HEALTH = (
    Panel(
        "Ready engines",
        "none",
        "Engines to which a frontend can send requests. At 0 it refuses or holds everything.",
        {"{{instance}}": 'sum by (instance) (triptych_frontend_engine_state{state="ready"})'},
    ),
    Panel(
        "Connections to engines by state",
        "none",
        "Each frontend's connections to engines: reconnecting means that a stream broke, down that the "
        "engine is lost.",
        {"{{state}}": "sum by (state) (triptych_frontend_engine_state)"},
    ),
    Panel(
        "Coordinator",
        "none",
        "Frontends with a session at the coordinator, engines registered there, and members that do not "
        "report. Streams do not need it; a change of the engines does.",
        {
            "frontends": "sum(triptych_frontend_coordinator_connected)",
            "engines": "sum(triptych_engine_is_member)",
            "unreported": "sum(triptych_coordinator_engines_unreported)",
        },
    ),
    Panel(
        "Starts of processes in 10 minutes",
        "none",
        "Restarts of each service. A process that starts again and again dies of something: its log has the "
        "cause.",
        {"{{instance}}": 'changes(process_start_time_seconds{job="triptych"}[10m])'},
    ),
    Panel(
        "Alerts",
        "none",
        "Alerts of deploy/alerts.yml that are pending or firing; docs/operations.md has a section for each.",
        {"{{alertname}} {{alertstate}}": "count by (alertname, alertstate) (ALERTS)"},
    ),
    Panel(
        "Ranks in step",
        "none",
        "Lockstep groups alone: engines in the present generation, and those that the group is to have.",
        {
            "{{dp_group}}": "triptych_coordinator_group_engines",
            "{{dp_group}} wanted": "triptych_coordinator_group_engines_wanted",
        },
    ),
)

_REQUESTS = (
    Panel(
        "Requests",
        "reqps",
        "Generation requests that arrive, by frontend.",
        {"{{instance}}": _rate("triptych_frontend_requests_total", "instance")},
    ),
    Panel(
        "Errors by status",
        "reqps",
        "Requests that were refused or ended with an error, by gRPC status code. INVALID_ARGUMENT is the "
        "client's.",
        {"{{code}}": f"{_rate('triptych_frontend_request_errors_total', 'code')} > 0"},
    ),
    Panel(
        "Queue of the frontend",
        "none",
        "Requests that have not ended, those without a first token (which admission limits), and those that "
        "wait for an engine.",
        {
            "open": "sum(triptych_frontend_requests_open)",
            "queued": "sum(triptych_frontend_requests_queued)",
            "held": "sum(triptych_frontend_requests_held)",
        },
    ),
    Panel(
        "Finish reasons",
        "reqps",
        "Outputs that ended, by reason; a request has n of them.",
        {"{{finished_reason}}": _rate("triptych_frontend_outputs_finished_total", "finished_reason")},
    ),
    Panel(
        "Aborts by cause",
        "reqps",
        "Requests that ended early: the client cancelled or left, a deadline passed, it read too slowly, or "
        "an Abort call.",
        {"{{cause}}": _rate("triptych_frontend_requests_aborted_total", "cause")},
    ),
    Panel(
        "Texts that wait for a text worker",
        "none",
        "Prompts that are not tokenized yet. If it stays above 0, raise --text-workers.",
        {"{{instance}}": "triptych_frontend_texts_queued"},
    ),
)

_LATENCY = (
    Panel(
        "Time to first token",
        "s",
        "From a request's arrival at the frontend to its first token.",
        _quantiles("triptych_frontend_time_to_first_token_seconds"),
    ),
    Panel(
        "Inter-token latency",
        "s",
        "Time between two tokens of an output. Tokens that arrive together share the time before them.",
        _quantiles("triptych_frontend_inter_token_latency_seconds"),
    ),
    Panel(
        "Whole request",
        "s",
        "From a request's arrival at the frontend to its last token.",
        _quantiles("triptych_frontend_request_duration_seconds"),
    ),
    Panel(
        "Queue",
        "s",
        "Time of an output in queues of engines, again after a move or a preemption included.",
        _quantiles("triptych_frontend_request_queue_seconds"),
    ),
    Panel(
        "Prefill",
        "s",
        "Time of an output in engines from being scheduled to its first token there.",
        _quantiles("triptych_frontend_request_prefill_seconds"),
    ),
    Panel(
        "Decode",
        "s",
        "Time of an output in engines from its first token there to its last.",
        _quantiles("triptych_frontend_request_decode_seconds"),
    ),
    Panel(
        "Text",
        "s",
        "Time to check and tokenize a request, the wait for a text worker included, and to turn the tokens "
        "of an output into text.",
        {
            f"{name} {legend}": query
            for name in ("tokenize", "detokenize")
            for legend, query in _quantiles(f"triptych_frontend_{name}_seconds", shares=(50, 99)).items()
        },
    ),
    Panel(
        "Boundary",
        "s",
        "Time of a request on the way to the engine and of its first answer on the way back.",
        _quantiles("triptych_frontend_engine_boundary_seconds"),
    ),
    Panel(
        "Whole request, with traces",
        "ms",
        "The same time as the collector counts it from spans: a point is a request, and leads to its trace. "
        "Needs OTEL_EXPORTER_OTLP_ENDPOINT.",
        _quantiles('triptych_duration_milliseconds{gen_ai_request_model!=""}'),
        has_exemplars=True,
    ),
)

_FAILOVER = (
    Panel(
        "Migrations by cause",
        "reqps",
        "Requests that were sent to another engine, by what became of the one before.",
        {"{{cause}}": _rate("triptych_frontend_requests_moved_total", "cause")},
    ),
    Panel(
        "Stale outputs",
        "ops",
        "Outputs of engines for requests that had moved to another one; they are dropped.",
        {"{{engine}}": _rate("triptych_frontend_engine_stale_outputs_total", "engine")},
    ),
    Panel(
        "Requests at fault",
        "none",
        "Requests that may have crashed an engine; those that were ended because two engines failed while "
        "they ran; and rows with NaN or infinite logits.",
        {
            "suspect": "sum(triptych_frontend_requests_suspect)",
            "quarantined": "sum(triptych_frontend_requests_quarantined_total)",
            "NaN rows {{engine}}": "triptych_engine_nan_rows_total",
        },
    ),
    Panel(
        "Age of the running step",
        "s",
        "How long the oldest step in flight has run, and how long it may: beyond that the engine counts as "
        "hung and ends itself.",
        {
            "{{engine}}": "triptych_engine_step_running_seconds",
            "{{engine}} budget": "triptych_engine_step_budget_seconds",
        },
    ),
    Panel(
        "Publish age",
        "s",
        "Time between two heartbeats of an engine, as frontends receive them: 0.5 s, more where an engine "
        "or its frontend is late.",
        {"{{engine}}": f"1 / {_rate('triptych_frontend_engine_heartbeats_total', 'engine')}"},
    ),
    Panel(
        "Lag of the frontend's event loop",
        "s",
        "How late the event loop runs what is due. Above 50 ms the frontend has too little CPU: more "
        "--workers, or cores.",
        _quantiles("triptych_frontend_event_loop_lag_seconds"),
    ),
)

_LOAD = (
    Panel(
        "Running requests",
        "none",
        "Requests that hold KV blocks and take part in steps, by engine.",
        {"{{engine}}": "triptych_engine_requests_running"},
    ),
    Panel(
        "Waiting requests",
        "none",
        "Requests that wait to be admitted, by engine; blocked ones wait for something else than room.",
        {
            "{{engine}}": "triptych_engine_requests_waiting",
            "{{engine}} blocked": "triptych_engine_requests_blocked",
        },
    ),
    Panel(
        "Waiting tokens",
        _TOKENS,
        "Tokens of waiting requests, without those that were cached when they were queued.",
        {"{{engine}}": "triptych_engine_waiting_tokens"},
    ),
)

_KV_CACHE = (
    Panel(
        "KV cache usage",
        "percentunit",
        "Share of the KV blocks that requests hold. Near 1, requests wait or are preempted.",
        {"{{engine}}": "triptych_engine_kv_cache_usage_ratio"},
    ),
    Panel(
        "Prefix hit rate",
        "percentunit",
        "Share of the prompt tokens looked up in the prefix cache that were found, at the first admission "
        "of a request.",
        {
            "{{engine}}": f"{_rate('triptych_engine_prefix_cache_hits_total', 'engine')}"
            f" / {_rate('triptych_engine_prefix_cache_queries_total', 'engine')}"
        },
    ),
    Panel(
        "Preemptions per request",
        "none",
        "Requests that lost their KV blocks and were queued again, for each request that ended. Steadily "
        "above 0.5 most work is done twice.",
        {
            "{{engine}}": f"{_rate('triptych_engine_preemptions_total', 'engine')}"
            f" / {_rate('triptych_engine_requests_finished_total', 'engine')}"
        },
    ),
    Panel(
        "Lifetime of a block",
        "s",
        "From the allocation of a block to the eviction of its content. Needs --kv-cache-metrics, as do the "
        "next two.",
        _quantiles("triptych_engine_kv_block_lifetime_seconds"),
    ),
    Panel(
        "Idle time of a block",
        "s",
        "From the last use of a block by a new request to its eviction: short, where the cache is too small "
        "for the prompts that come back.",
        _quantiles("triptych_engine_kv_block_idle_seconds"),
    ),
    Panel(
        "Reuse gap of a block",
        "s",
        "Time between two uses of a block by new requests. A cache that keeps blocks longer than this has "
        "the prefix.",
        _quantiles("triptych_engine_kv_block_reuse_gap_seconds"),
    ),
)

_FLOW = (
    Panel(
        "Tokens in",
        _TOKEN_RATE,
        "Prompt tokens of requests that were sent to engines, and those of them that came from a prefix "
        "cache.",
        {
            "prompt {{model_name}}": _rate("triptych_frontend_prompt_tokens_total", "model_name"),
            "cached {{model_name}}": _rate("triptych_frontend_cached_prompt_tokens_total", "model_name"),
        },
    ),
    Panel(
        "Tokens out",
        _TOKEN_RATE,
        "Generated tokens of all outputs.",
        {"{{model_name}}": _rate("triptych_frontend_generated_tokens_total", "model_name")},
    ),
    Panel(
        "Tokens per step",
        _TOKENS,
        "Prompt and generated tokens of an engine for each step that it launched.",
        {
            "{{engine}}": f"({_rate('triptych_engine_prompt_tokens_total', 'engine')}"
            f" + {_rate('triptych_engine_generated_tokens_total', 'engine')})"
            f" / {_rate('triptych_engine_steps_total', 'engine')}"
        },
    ),
    Panel(
        "Prompt length",
        _TOKENS,
        "Prompt tokens of a request.",
        _quantiles("triptych_frontend_request_prompt_tokens"),
    ),
    Panel(
        "Output length",
        _TOKENS,
        "Tokens of an output that ended.",
        _quantiles("triptych_frontend_output_tokens"),
    ),
    Panel(
        "Chunked prefills",
        "ops",
        "Admissions whose first step did not reach the last known token: prompts that are longer than what "
        "a step has left.",
        {"{{engine}}": _rate("triptych_engine_chunked_prefills_total", "engine")},
    ),
    Panel(
        "Accepted drafts",
        "percentunit",
        "Share of the verified draft tokens that were accepted. None without speculative decoding.",
        {
            "{{engine}}": f"{_rate('triptych_engine_accepted_draft_tokens_total', 'engine')}"
            f" / {_rate('triptych_engine_draft_tokens_total', 'engine')}"
        },
    ),
    Panel(
        "Accepted drafts per row",
        "none",
        "Draft tokens that a row of a step with drafts yields, beside the one that every row yields.",
        {
            "{{engine}}": f"{_rate('triptych_engine_accepted_draft_tokens_total', 'engine')}"
            f" / {_rate('triptych_engine_draft_rows_total', 'engine')}"
        },
    ),
)

_STEPS = (
    Panel(
        "Step time",
        "s",
        "Time from the beginning of a step, or the end of the one before it, to its result.",
        _quantiles("triptych_engine_step_duration_seconds"),
    ),
    Panel(
        "Steps",
        "ops",
        "Steps that an engine launches.",
        {"{{engine}}": _rate("triptych_engine_steps_total", "engine")},
    ),
    Panel(
        "Device memory",
        "bytes",
        "Memory of an engine's tensors on its GPU; without a GPU, the resident memory of the process.",
        {"{{engine}}": "triptych_engine_device_memory_bytes"},
    ),
    Panel(
        "Memory of the processes",
        "bytes",
        "Resident memory of each service.",
        {"{{instance}}": 'process_resident_memory_bytes{job="triptych"}'},
    ),
    Panel(
        "CPU of the processes",
        "none",
        "Cores that each service uses.",
        {"{{instance}}": _each_rate('process_cpu_seconds_total{job="triptych"}')},
    ),
    Panel(
        "Backlog of streams",
        "bytes",
        "Outputs of an engine that are not written to frontends yet. If it grows, a frontend reads too "
        "slowly.",
        {"{{engine}}": "triptych_engine_stream_unread_bytes"},
    ),
)

# By file: title, and rows of panels.
DASHBOARDS: Mapping[str, tuple[str, Mapping[str, tuple[Panel, ...]]]] = {
    "operators": (
        "triptych: operators",
        {
            "Health": _HEALTH,
            "Requests": _REQUESTS,
            "Latency": _LATENCY,
            "Failures and stalls": _FAILOVER,
        },
    ),
    "capacity": (
        "triptych: capacity",
        {"Load": _LOAD, "KV cache": _KV_CACHE, "Tokens": _FLOW, "Steps, memory and CPU": _STEPS},
    ),
}


def written(name: str) -> str:
    """The file of a dashboard, in Grafana's JSON."""
    title, rows = DASHBOARDS[name]
    dashboard = {
        "uid": f"triptych-{name}",
        "title": title,
        "tags": ["triptych"],
        "schemaVersion": 40,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "annotations": {"list": []},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "Prometheus", "value": "prometheus"},
                }
            ]
        },
        "links": [
            {
                "title": "triptych",
                "type": "dashboards",
                "tags": ["triptych"],
                "icon": "external link",
                "tooltip": "",
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
            }
        ],
        "panels": list(_laid_out(rows)),
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _laid_out(rows: Mapping[str, tuple[Panel, ...]]) -> Iterator[dict[str, Any]]:
    ids = count(1)
    top = 0
    for title, panels in rows.items():
        area = {"h": 1, "w": _WIDTH * _PER_LINE, "x": 0, "y": top}
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": area,
            "panels": [],
        }
        top += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, _PER_LINE)
            area = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": top + line * _HEIGHT}
            yield {"id": next(ids), "gridPos": area, **_graph(panel)}
        top += -(-len(panels) // _PER_LINE) * _HEIGHT


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {
            # Counts and times alone: an axis that begins at 0 does not magnify noise.
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "spanNulls": 30_000}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": panel.has_exemplars,
            }
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(written(name), encoding="utf-8")
