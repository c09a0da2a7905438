"""The verb `replay`: a line for each run, and 1 where a scheduler decides otherwise."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import triptych_cli.verbs.replay
from engine_svc.features.sched_trace.file import TraceFile
from engine_svc.features.sched_trace.scheduler import SchedTrace
from tests.engine_svc.features.sched_trace.tracing import SETUP, Tracing, build, request
from triptych_cli.verbs.replay import run_replay
from triptych_kit.clock import FakeClock


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of one request in three steps."""
    path = tmp_path / "trace.jsonl"
    feature = SchedTrace(SETUP, FakeClock(), TraceFile(path))
    core = build(SETUP)
    tracing = Tracing()
    tracing.scheduler = feature.wrap(core.scheduler, core.kv_cache)
    tracing.scheduler.add(request("r0", max_tokens=3))
    for _ in range(4):
        tracing.step()
    feature.close()
    return path


def test_the_same_decisions_are_said_and_counted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_replay(trace) == 0
    assert capsys.readouterr().out == (
        "run 1: fcfs, 1 step in flight, 25 blocks: 4 steps, 1 requests, 0 preemptions, "
        "0 prefix hits of 0 tokens: the same decisions\n"
    )


def test_another_decision_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = trace.read_text().replace('"scheduled_new_req_ids":["r0"]', '"scheduled_new_req_ids":["r1"]')
    trace.write_text(changed)
    assert run_replay(trace) == 1
    assert capsys.readouterr().out.endswith(
        'other decisions from step 1: step_decision.scheduled_new_req_ids is ["r0"] instead of ["r1"]\n'
    )


def test_of_a_line_without_end_only_a_part_is_read(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(triptych_cli.verbs.replay, "_MAX_LINE_BYTES", 1 << 16)
    assert run_replay(Path("/dev/zero")) == 2
    assert capsys.readouterr().err == "triptych replay: /dev/zero: line 1 is not JSON\n"


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("no.jsonl", None, "No such file or directory"),
        ("empty.jsonl", b"", "it is empty"),
        ("text.jsonl", b"hello\n", "line 1 is not JSON"),
        ("case.json.gz", b"hello\n", "it is not a recorded case"),
        ("list.json.gz", gzip.compress(b"[]", mtime=0), "it is not a recorded case"),
        ("nested.json.gz", gzip.compress(b"[" * 200_000, mtime=0), "it is not a recorded case"),
        ("damaged.json.gz", gzip.compress(b"[]", mtime=0)[:10] + b"\xff" * 20, "it is not a recorded case"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_2(
    name: str, content: bytes | None, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert run_replay(path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"triptych replay: {path}: {cause}")
