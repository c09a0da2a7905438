"""What the scheduler benchmark measures, and that it measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scheduler import Peer, PeerFailed, compare_hashing, main, running_peer, summarize
from benchmarks.scheduler_load import LoadShape, SchedulerLoad, Timings, WrongLoad, time_hashes

_SHORT = ["--rounds", "2", "--steps", "20", "--lead-in", "2"]


def _shape(num_running: int, *, overlapped: bool = False, prompt_spread: int = 1) -> LoadShape:
    return LoadShape(num_running, overlapped, prompt_spread=prompt_spread, num_blocks=1_000)


@pytest.fixture
def load():
    """Builds loads, and has the collector look at everything again after the test."""
    built = []

    def build(shape: LoadShape, policy: str = "fcfs") -> SchedulerLoad:
        built.append(SchedulerLoad(shape, policy))
        return built[-1]

    yield build
    for each in built:
        each.close()


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_step_after_the_prompts_decodes_all_requests(load, overlapped):
    timings = load(_shape(8, overlapped=overlapped)).measure(4, 50)
    assert timings.num_rows == [8] * 50
    assert len(timings.schedule_s) == len(timings.update_s) == 50
    assert all(seconds > 0 for seconds in timings.total_s)


@pytest.mark.parametrize(("overlapped", "num_in_flight"), [(False, 0), (True, 1)])
def test_overlapped_is_a_step_in_flight_while_the_next_is_planned(load, overlapped, num_in_flight):
    decoding = load(_shape(2, overlapped=overlapped))
    decoding.measure(0, 10)
    stats = decoding.core.scheduler.stats()
    # One step computes the prompt, each of the others a token; 64 tokens fill 4 blocks, 73 a fifth.
    assert stats.step_number == 10
    assert decoding.num_steps_in_flight == num_in_flight
    assert stats.num_used_blocks == 2 * 5


def test_no_two_requests_share_a_block(load):
    decoding = load(_shape(40, prompt_spread=16))
    decoding.measure(4, 20)
    stats = decoding.core.scheduler.stats()
    assert stats.prefix_queries > 0
    assert stats.prefix_hits == 0
    assert stats.num_preemptions == 0


def test_until_idle_serves_every_token(load):
    shape = LoadShape(3, overlapped=False, max_tokens=5, num_blocks=100)
    assert load(shape).measure_until_idle().num_rows == [3] * 5


def test_figures_are_medians_and_the_99th_percentile_of_both_verbs_together():
    timings = Timings([1e-6] * 99 + [9e-6], [3e-6] * 100, [4] * 100)
    figures = summarize(timings, None, 4)
    assert figures["schedule_us"] == pytest.approx(1)
    assert figures["update_us"] == pytest.approx(3)
    assert figures["per_decode_us"] == pytest.approx(1)
    assert figures["p99_us"] == pytest.approx(4.08)
    assert figures["ratio"] is None
    assert figures["peer_schedule_us"] is None


def test_the_ratio_says_how_much_longer_the_peer_takes():
    ours, theirs = Timings([1e-6], [1e-6], [2]), Timings([6e-6], [2e-6], [2])
    figures = summarize(ours, theirs, 2)
    assert figures["ratio"] == pytest.approx(4)
    assert figures["peer_per_decode_us"] == pytest.approx(4)


def test_a_step_without_all_requests_is_an_error():
    with pytest.raises(WrongLoad, match=r"steps of 4 decodes had \[3, 4\] rows"):
        summarize(Timings([1.0, 1.0], [1.0, 1.0], [3, 4]), None, 4)


def test_time_is_given_with_what_the_call_returned():
    timings = Timings()
    returned, seconds = timings.time(divmod, 7, 2)
    assert returned == (3, 1)
    assert seconds > 0


def test_the_report_has_a_row_for_each_size_without_and_with_overlap(tmp_path, capsys):
    path = tmp_path / "scheduler.json"
    main([*_SHORT, "--running", "1", "4", "--json", str(path)])
    record = json.loads(path.read_text())
    rows = record["rows"]
    assert [(row["running"], row["overlapped"]) for row in rows] == [
        (1, False),
        (4, False),
        (1, True),
        (4, True),
    ]
    for row in rows:
        assert row["num_steps"] == 40
        assert 0 < row["schedule_us"] < row["p99_us"]
        assert 0 < row["update_us"] < row["p99_us"]
        assert 0 < row["in_phase_per_decode_us"] < row["in_phase_p99_us"]
        assert row["hash_us_per_1000_tokens"] > 0
        assert {value for name, value in row.items() if "peer" in name} == {None}
        assert row["peer_schedule_us"] is row["peer_update_us"] is row["ratio"] is None
    assert record["settings"]["max_num_batched_tokens"] == 8_192
    assert record["settings"]["peer"] is None
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_hashes_are_timed_for_fresh_prompts():
    assert len(time_hashes(64, 3, 16)) == 3
    assert compare_hashing(None)["peer_hash_us_per_1000_tokens"] is None


def test_a_peer_that_does_not_start_is_reported():
    with pytest.raises(PeerFailed, match="ended with 1"), running_peer(Path("/bin/false")):
        pass


def test_the_peer_is_asked_in_lines_of_json():
    script = """
import json, sys
print(json.dumps({"version": "9.9"}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    assert command == {"lead_in": 2, "steps": 3}, command
    answer = {"schedule_s": [1, 2, 3], "update_s": [1, 1, 1], "num_rows": [4, 4, 4], "num_interrupted": 1}
    print(json.dumps(answer), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        peer = Peer(process)
        assert peer.version == "9.9"
        timings = peer.measure(2, 3)
    assert timings.total_s == [2, 3, 4]
    assert timings.num_interrupted == 1
