"""Replays a recorded case step by step, and says where the scheduler decides otherwise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.conformance.adapter import ReplayEngine, make


def read_case(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return case


def first_difference(case: dict[str, Any]) -> str | None:
    """Where a new scheduler leaves the case: order, tokens, blocks by id, drafts, queues, outputs.

    None: nowhere.
    """
    engine = make(case["config"])
    for index, step in enumerate(case["steps"]):
        for event in step["events"]:
            # A copy: the engine goes on writing behind the prompt it was given.
            if not _apply(engine, _plain(event)):
                return f"step {index}, {event['op']}: not {event['result']}"
        got = {"after_events": _state(engine), "decision": engine.schedule()}
        for name, value in got.items():
            if {key: one for key, one in _plain(value).items() if key in step[name]} != step[name]:
                return f"step {index}, {name}: {_plain(value)}\ninstead of {step[name]}"
        for update in step["updates"]:
            outcome = engine.update(_plain(update["model"]) | {"for_step": update["for_step"]})
            outcome["freed"].sort()
            expected = update["expected"] | {"freed": sorted(update["expected"]["freed"])}
            if _plain(outcome | _state(engine)) != expected:
                return f"step {index}, after update: {_plain(outcome | _state(engine))} instead of {expected}"
            if (late := update.get("late")) is not None:
                found = engine.late_drafts(_plain(late))
                if _plain(found) != late["expected"]:
                    return f"step {index}, late drafts: {found} instead of {late['expected']}"
    return None


def _apply(engine: ReplayEngine, event: dict[str, Any]) -> bool:
    """False if the event has another result than recorded."""
    match event["op"]:
        case "add":
            engine.add(event["request"])
        case "extend":
            engine.extend({name: value for name, value in event.items() if name != "op"})
        case "close":
            engine.close(event["id"])
        case "abort":
            engine.abort(event["ids"])
        case "pause":
            engine.set_pause(event["state"])
        case "grammar_ready":
            engine.grammar_ready(event["id"])
        case "grammar_failed":
            engine.grammar_failed(event["id"])
        case "reset_encoder_cache":
            engine.reset_encoder_cache()
        case "reset_prefix_cache":
            return engine.reset_prefix_cache(event["running"]) is event["result"]
        case unknown:
            raise ValueError(f"event {unknown} is not known here")
    return True


def _state(engine: ReplayEngine) -> dict[str, Any]:
    state = {"free_blocks": engine.free_blocks(), **engine.queue_ids()}
    slots = engine.encoder_slots()
    return state if slots is None else state | {"encoder_slots": slots}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
