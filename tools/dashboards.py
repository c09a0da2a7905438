"""Writes the dashboards of deploy/grafana: `python tools/dashboards.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards"
# Whichever Prometheus the reader selects; the provisioned one is the default.
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LINE_WIDTH = 24
_SIZES = {"timeseries": (8, 8), "heatmap": (8, 8), "stat": (4, 4)}  # width and height by kind
# Those that have the label of a model. tests/system/test_observability.py compares them with what is served.
_OF_MODELS = re.compile(
    r"triptych_engine_\w+|triptych_frontend_(outputs_finished_total|(cached_prompt|prompt|generated)_tokens\w*"
    r"|(time_to_first_token|inter_token_latency|time_per_output_token)_seconds\w*"
    r"|request_(duration|queue|prefill|decode)_seconds\w*|request_prompt_tokens\w*|output_tokens\w*)"
)
_FROM_SPANS = "triptych_duration_milliseconds"
_SELECTOR = re.compile(r"\b((?:triptych|process)_\w+|up)\b(?:\{([^}]*)\})?")
_TOKENS, _TOKEN_RATE = "suffix: tokens", "suffix: tokens/s"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. queries: expressions of Prometheus by legend, in which {{label}} is the label's value.

    colors: of a number, from each value on.
    """

    title: str
    unit: str
    description: str
    queries: Mapping[str, str]
    has_exemplars: bool = False
    kind: Literal["timeseries", "heatmap", "stat"] = "timeseries"
    colors: tuple[tuple[str, float | None], ...] = (("blue", None),)


def _rate(metric: str, by: str = "") -> str:
    return f"sum by ({by}) ({_each_rate(metric)})" if by else f"sum({_each_rate(metric)})"


def _each_rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


def _quantiles(histogram: str, shares: tuple[int, ...] = (50, 95, 99)) -> dict[str, str]:
    """Percentiles over all instances."""
    name, braces, matchers = histogram.partition("{")
    buckets = _rate(f"{name}_bucket{braces}{matchers}", "le")
    return {f"p{share}": f"histogram_quantile({share / 100:g}, {buckets})" for share in shares}


def _heatmap(title: str, description: str, histogram: str) -> Panel:
    query = f"sum by (le) (increase({histogram}_bucket[$__rate_interval]))"
    return Panel(title, "s", description, {"{{le}}": query}, kind="heatmap")


_NOW = (
    Panel(
        "Up",
        "percentunit",
        "Share of the services that Prometheus can scrape.",
        {"up": 'sum(up{job="triptych"}) / count(up{job="triptych"})'},
        kind="stat",
        colors=(("red", None), ("green", 1)),
    ),
    Panel(
        "Requests per second",
        "reqps",
        "Generation requests that arrive.",
        {"requests": _rate("triptych_frontend_requests_total")},
        kind="stat",
    ),
    Panel(
        "Failing requests",
        "percentunit",
        "Share of requests that were refused or ended with an error.",
        {
            "errors": f"{_rate('triptych_frontend_request_errors_total')}"
            f" / ({_rate('triptych_frontend_requests_total')} > 0)"
        },
        kind="stat",
        colors=(("green", None), ("orange", 0.01), ("red", 0.1)),
    ),
    Panel(
        "Tokens per second",
        _TOKEN_RATE,
        "Generated tokens of all outputs.",
        {"tokens": _rate("triptych_frontend_generated_tokens_total")},
        kind="stat",
    ),
    Panel(
        "Time to first token, p95",
        "s",
        "95 of 100 requests have their first token within this time of their arrival.",
        _quantiles("triptych_frontend_time_to_first_token_seconds", shares=(95,)),
        kind="stat",
    ),
    Panel(
        "Fullest KV cache",
        "percentunit",
        "Share of the KV blocks that requests hold, at the engine with the largest. Near 1, requests wait.",
        {"KV": "max(triptych_engine_kv_cache_usage_ratio)"},
        kind="stat",
        colors=(("green", None), ("orange", 0.85), ("red", 0.97)),
    ),
)

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
        "Time per output token",
        "s",
        "Mean time between the tokens of an output, one value an output.",
        _quantiles("triptych_frontend_time_per_output_token_seconds"),
    ),
    _heatmap(
        "Times to first token",
        "How many requests had their first token within which time.",
        "triptych_frontend_time_to_first_token_seconds",
    ),
    _heatmap(
        "Times per output token",
        "How many outputs had which mean time between their tokens.",
        "triptych_frontend_time_per_output_token_seconds",
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
        _quantiles(f'{_FROM_SPANS}{{gen_ai_request_model=~"$model"}}'),
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
            "Now": _NOW,
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
                },
                _choice("model", "Model", "label_values(triptych_engine_cache_info, model_name)"),
                _choice("instance", "Instance", "label_values(triptych_build_info, instance)"),
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


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable with any number of the values that `query` gives."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # with the time range: engines come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _chosen(expression: str) -> str:
    """The expression with matchers for the models and instances that the reader has chosen."""

    def chosen(found: re.Match[str]) -> str:
        name, matchers = found[1], found[2]
        if name.startswith(_FROM_SPANS):
            return found[0]
        parts = [matchers] if matchers else []
        if _OF_MODELS.fullmatch(name):
            parts.append('model_name=~"$model"')
        parts.append('instance=~"$instance"')
        return f"{name}{{{','.join(parts)}}}"

    return _SELECTOR.sub(chosen, expression)


def _laid_out(rows: Mapping[str, tuple[Panel, ...]]) -> Iterator[dict[str, Any]]:
    ids = count(1)
    top = 0
    for title, panels in rows.items():
        area = {"h": 1, "w": _LINE_WIDTH, "x": 0, "y": top}
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": area,
            "panels": [],
        }
        top += 1
        width, height = _SIZES[panels[0].kind]
        per_line = _LINE_WIDTH // width
        for number, panel in enumerate(panels):
            line, column = divmod(number, per_line)
            area = {"h": height, "w": width, "x": column * width, "y": top + line * height}
            yield {"id": next(ids), "gridPos": area, **_graph(panel)}
        top += -(-len(panels) // per_line) * height


def _graph(panel: Panel) -> dict[str, Any]:
    field_config, options = _DRAWN[panel.kind](panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": field_config, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": _chosen(expression),
                "legendFormat": legend,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
                "exemplar": panel.has_exemplars,
            }
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


_Drawing = tuple[dict[str, Any], dict[str, Any]]  # of all fields, and of the panel


def _timeseries(panel: Panel) -> _Drawing:
    # Counts and times alone: an axis that begins at 0 does not magnify noise.
    return {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "spanNulls": 30_000}}, {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat(panel: Panel) -> _Drawing:
    steps = [{"color": color, "value": value} for color, value in panel.colors]
    return {
        "unit": panel.unit,
        "min": 0,
        "noValue": "none",
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }, {
        "colorMode": "value" if len(steps) > 1 else "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "value",
        "wideLayout": True,
    }


def _heat(panel: Panel) -> _Drawing:
    return {"unit": panel.unit, "custom": {"scaleDistribution": {"type": "linear"}}}, {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "none", "decimals": 0},
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        # An empty cell is drawn as nothing.
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }


_DRAWN = {"timeseries": _timeseries, "stat": _stat, "heatmap": _heat}


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(written(name), encoding="utf-8")
