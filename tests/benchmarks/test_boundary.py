"""The arithmetic of the boundary's figures, and the frames of its loop in another process."""

from __future__ import annotations

import pytest

from benchmarks.boundary import main
from benchmarks.boundary_bridge import Frames, frame, read_step, write_step
from benchmarks.boundary_figures import Arrangement, Round, shortfalls, summary
from engine_svc.core.request import FinishReason
from engine_svc.loop.step_output import FinishedRow, StepOutput

OURS = Arrangement("thread", "aio", "tcp", "ours")
PEER = Arrangement("thread", "zmq", "unix", "default")


def one_round(*, engine_cpu_s: float = 0.008, first_output_s: tuple[float, ...] = (0.0002, 0.0004)) -> Round:
    return Round(
        engine_cpu_s=engine_cpu_s,
        pace_cpu_s=0.002,
        frontend_cpu_s=0.009,
        rows_cpu_s=0.00003,
        num_steps=100,
        num_messages=101,
        num_bytes=210_000,
        first_output_s=first_output_s,
    )


def row(arrangement: Arrangement, **changes: float) -> dict[str, str | int | float]:
    return {**summary(arrangement, 256, [one_round()]), **changes}


def test_a_round_leaves_out_the_pace_and_the_rows():
    found = one_round()
    assert found.engine_us == pytest.approx(60)
    assert found.frontend_us == pytest.approx(90)
    assert found.stream_us == pytest.approx(60)


def test_a_summary_has_the_median_of_the_rounds_and_the_times_of_all():
    rounds = [
        one_round(engine_cpu_s=0.008, first_output_s=(0.0001,)),
        one_round(engine_cpu_s=0.018, first_output_s=(0.0002,)),
        one_round(engine_cpu_s=0.006, first_output_s=(0.0009,)),
    ]
    found = summary(OURS, 16, rounds)
    assert (found["arrangement"], found["requests"]) == ("thread aio tcp ours", 16)
    assert (found["engine_us"], found["engine_best_us"], found["pace_us"]) == (60.0, 40.0, 20.0)
    assert (found["first_p50_us"], found["messages_a_step"], found["bytes_a_step"]) == (200.0, 1.01, 2100)


def test_what_keeps_its_promises_falls_short_of_none():
    rows = [row(OURS, first_p50_us=109.0), row(PEER, first_p50_us=100.0)]
    assert shortfalls(rows, OURS, PEER) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"engine_us": 60.2}, "engine"), ({"stream_us": 61.0}, "frontend"), ({"first_p50_us": 340.0}, "1.13")],
)
def test_each_broken_promise_is_named(changes, word):
    (found,) = shortfalls([row(OURS, **changes), row(PEER)], OURS, PEER)
    assert word in found


def test_only_the_judged_number_of_requests_is_judged():
    others = {**row(OURS, engine_us=1000.0), "requests": 1024}
    assert shortfalls([row(OURS), row(PEER), others], OURS, PEER) == []


def test_an_arrangement_that_there_is_not_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["boundary", "--only", "zmq unix", "thread zmq unix"])
    with pytest.raises(SystemExit):
        main()
    assert "invalid choice: 'thread zmq unix'" in capsys.readouterr().err


def test_a_step_survives_the_bridge():
    step = StepOutput(
        7, [3, 9, 5], [1, 0, 1], [11, 12], [FinishedRow(1, FinishReason.ABORT)], [(0, 0), (2, 0)]
    )
    assert read_step(write_step(step)) == step


@pytest.mark.parametrize("size", [1, 3, 100])
def test_frames_are_whole_however_the_bytes_are_cut(size):
    data = frame(1, b"first") + frame(2, b"") + frame(3, b"third")
    frames = Frames()
    found = [each for start in range(0, len(data), size) for each in frames.feed(data[start : start + size])]
    assert found == [(1, b"first"), (2, b""), (3, b"third")]
