"""Reads a recorded case: the decisions of a scheduler in one compressed JSON object, by an earlier format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine_svc.features.sched_trace.records import DECISION, FORMAT, PREFIX_CACHE, SNAPSHOT, Record
from engine_svc.features.sched_trace.replay import BadTrace

SUFFIX = ".json.gz"
_NOT_A_CASE = (
    EOFError, gzip.BadGzipFile, zlib.error, ValueError, RecursionError,
    LookupError, TypeError, AttributeError,
)  # fmt: skip


def read_case(path: Path) -> Iterator[Record]:
    """The records of a trace with what the case has of them. Raises BadTrace."""
    try:
        case = json.loads(gzip.decompress(path.read_bytes()))
        yield from as_records(case)
    except _NOT_A_CASE as error:
        raise BadTrace(f"it is not a recorded case ({type(error).__name__}: {error})") from error


def as_records(case: Record) -> Iterator[Record]:
    config = case["config"]
    features = {"adapters": {"max_adapters": config["max_adapters"]}} if config.get("max_adapters") else {}
    if (options := encoder_options(config)) is not None:
        features["media"] = options
    trace = {
        "format": FORMAT,
        "version": case.get("reference_version", ""),
        "config": {**config, "features": features},
    }
    head: Record = {"trace": trace}
    updates: list[Record] = []
    for step, recorded in enumerate(case["steps"], start=1):
        decided = recorded["decision"]
        events = [*updates, *map(_as_given, recorded["events"])]
        if events or decided["scheduled"] or decided["preempted"]:
            # What features count is not in a snapshot.
            state = {
                name: value for name, value in recorded["after_events"].items() if name != "encoder_slots"
            }
            yield {"kind": SNAPSHOT, "step": step, "at": 0.0, **state, "events": events, **head}
            yield from _as_prefix_events(step, decided)
            yield _as_decision(step, decided)
            head = {}
        # A step without requests has an update without an effect.
        updates = [_as_event(update) for update in recorded["updates"] if update["model"]["sampled"]]
    if updates:
        yield {"kind": SNAPSHOT, "step": len(case["steps"]) + 1, "at": 0.0, "events": updates, **head}


def _as_prefix_events(step: int, decided: Record) -> Iterator[Record]:
    for name, _ in decided["scheduled"]:
        if name not in decided["continued"]:
            hit = decided["computed"][name]
            yield {"kind": PREFIX_CACHE, "step": step, "req_id": name, "local_hit_tokens": hit}


def _as_decision(step: int, decided: Record) -> Record:
    names: Sequence[str] = [name for name, _ in decided["scheduled"]]
    blocks = {name: decided["blocks"][name] for name in names}
    return {
        "kind": DECISION,
        "step": step,
        "scheduled_new_req_ids": decided["new"],
        "scheduled_resumed_req_ids": decided["resumed"],
        "scheduled_running_req_ids": decided["continued"],
        "preempted_req_ids": decided["preempted"],
        "num_scheduled_tokens": dict(decided["scheduled"]),
        "draft_token_ids": {name: decided["spec"][name] for name in names if name in decided["spec"]},
        "block_ids": {name: both for name, both in blocks.items() if any(both["hit"]) or any(both["new"])},
        "free_blocks": decided["free_blocks"],
    }


def _as_given(event: Record) -> Record:
    """An event from outside, whose request may name an adapter and have spans of content."""
    if "request" not in event:
        return event
    request = {**event["request"], "spans": content_spans(event["request"])}
    if (adapter := request.get("adapter")) is not None:
        request["extra_keys"] = [f"adapter:{adapter}"]
    return {**event, "request": request}


def encoder_options(config: Record) -> dict[str, int] | None:
    """What a replay makes the encoder's budget from; None: the case has none."""
    if config.get("encoder_cache_size") is None:
        return None
    return {
        "max_outputs": config["encoder_budget"],
        "max_kept": config["encoder_cache_size"],
        "divides": int(config["chunked_media"]),
        "num_ahead": int(config["drop_last_matched_block"]),
    }


def content_spans(prompt: Record) -> list[Record]:
    """The fields of the spans of a prompt, or of what a turn adds to one."""
    return [
        {
            "start": item["offset"],
            "num_tokens": item["length"],
            "key": f"media:{item['hash']}",
            "tokens": tuple(index for index, flag in enumerate(item.get("embeds", ())) if not flag),
        }
        for item in prompt.get("media", ())
    ]


def _as_event(update: Record) -> Record:
    outputs = [
        output
        for output in update["expected"]["outputs"]
        if output["finish"] is not None or "cached_tokens" in output
    ]
    return {
        "op": "update",
        "for_step": update["for_step"] + 1,
        "sampled": update["model"]["sampled"],
        "drafts": update["model"].get("drafts") or {},
        "outputs": outputs,
    }
