"""The scheduler decides as recorded: order, tokens, blocks by id, drafts, queues, outputs, at every step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.adapter import ReplayEngine, make

CASES = sorted((Path(__file__).parent / "cases").glob("*.json.gz"))


def _name(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


def _apply(engine: ReplayEngine, event: dict[str, Any]) -> None:
    if event["op"] == "add":
        engine.add(event["request"])
    elif event["op"] == "abort":
        engine.abort(event["ids"])
    else:
        engine.set_pause(event["state"])


def _state(engine: ReplayEngine) -> dict[str, Any]:
    return {"free_blocks": engine.free_blocks(), **engine.queue_ids()}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_cases_are_there():
    assert len(CASES) > 50


@pytest.mark.parametrize("path", CASES, ids=_name)
def test_the_scheduler_decides_as_recorded(path: Path):
    case = json.loads(gzip.decompress(path.read_bytes()))
    engine = make(case["config"])
    for index, step in enumerate(case["steps"]):
        for event in step["events"]:
            _apply(engine, event)
        assert _state(engine) == step["after_events"], f"step {index}, after events"
        decision = _plain(engine.schedule())
        assert decision == step["decision"], f"step {index}, decision"
        for update in step["updates"]:
            got = engine.update({**update["model"], "for_step": update["for_step"]})
            expected = update["expected"]
            assert _plain(got["outputs"]) == expected["outputs"], f"step {index}, outputs"
            assert sorted(got["freed"]) == sorted(expected["freed"]), f"step {index}, freed"
            assert _state(engine) == {key: expected[key] for key in _state(engine)}, (
                f"step {index}, after update"
            )
