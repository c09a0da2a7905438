"""What the scheduler benchmark measures, and that it measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rig.lines import LineProcessFailed
from benchmarks.scenarios.scheduler import running_peer, summarize
from benchmarks.scenarios.scheduler.load import LoadShape, SchedulerLoad, Timings, WrongLoad


def _shape(num_running: int, *, overlapped: bool = False, prompt_spread: int = 1) -> LoadShape:
    return LoadShape(num_running, overlapped, prompt_spread=prompt_spread, num_blocks=1_000)


@pytest.fixture
def load():
    """Builds loads, and has the collector look at everything again after the test."""
    built = []

    def build(shape: LoadShape) -> SchedulerLoad:
        built.append(SchedulerLoad(shape))
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


def test_times_are_medians_and_the_99th_percentile_of_both_verbs_together():
    timings = Timings([1e-6] * 99 + [9e-6], [3e-6] * 100, [4] * 100)
    figures = summarize(timings, None, 4)
    assert figures["schedule_us"] == pytest.approx(1)
    assert figures["update_us"] == pytest.approx(3)
    assert figures["per_decode_us"] == pytest.approx(1)
    assert figures["p99_us"] == pytest.approx(4.08)
    assert figures["ratio"] is None
    assert figures["peer_schedule_us"] is None


def test_the_ratio_is_how_much_longer_the_peer_takes():
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


def test_a_peer_that_does_not_start_is_reported():
    with pytest.raises(LineProcessFailed, match="ended with 1"), running_peer(Path("/bin/false")):
        pass
