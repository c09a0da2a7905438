"""The arithmetic of a run, from timelines written by hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from triptych_cli.bench.metrics import OK, Distribution, ServiceLevel, Timeline, percentile, summarize
from triptych_cli.bench.plot import PlotError, check_can_plot, cumulative_share, draw, in_flight, token_rate


def timeline(
    *arrivals: tuple[float, int],
    sent_at: float = 0.0,
    ended_at: float | None = None,
    code: str = OK,
    **fields,
) -> Timeline:
    """A request whose messages came at these instants with so many tokens each."""
    return Timeline(
        **{"due_at": sent_at, "num_prompt_tokens": 10, **fields},
        sent_at=sent_at,
        token_times=[at for at, _ in arrivals],
        token_counts=[count for _, count in arrivals],
        ended_at=arrivals[-1][0] if ended_at is None else ended_at,
        code=code,
    )


def test_the_first_token_counts_from_the_sending_not_from_when_it_was_due() -> None:
    one = timeline((1.25, 1), sent_at=1.0, due_at=0.9)
    assert one.ttft_ms == pytest.approx(250)
    assert one.lateness_ms == pytest.approx(100)


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    assert timeline((1.0, 1), (1.1, 1), (1.5, 1)).tpot_ms == pytest.approx(250)


def test_time_per_output_token_counts_tokens_and_not_messages() -> None:
    one = timeline((1.0, 2), (1.4, 3))
    assert one.tpot_ms == pytest.approx(100)
    assert one.itls_ms == pytest.approx([400])


def test_one_token_has_no_time_per_token() -> None:
    assert timeline((1.0, 1)).tpot_ms is None
    assert timeline((1.0, 1)).itls_ms == []


def test_the_end_is_that_of_the_output_and_not_its_last_token() -> None:
    assert timeline((1.0, 1), (2.0, 1), sent_at=0.5, ended_at=2.25).e2e_ms == pytest.approx(1750)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)


def test_a_distribution_does_not_depend_on_the_order() -> None:
    one = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert one == Distribution.of([1.0, 2.0, 3.0, 4.0])
    assert one is not None
    assert (one.mean, one.median, one.min, one.max) == (2.5, 2.5, 1.0, 4.0)
    assert one.p90 == pytest.approx(3.7)
    assert one.p99 == pytest.approx(3.97)
    assert one.std == pytest.approx(math.sqrt(1.25))


def test_rates_count_completed_requests_from_the_first_sending_to_the_last_end() -> None:
    summary = summarize(
        [
            timeline((1.0, 1), (3.0, 1), sent_at=1.0, num_cached_tokens=8),
            timeline((4.0, 2), (5.0, 4), sent_at=2.0),
            timeline((2.0, 3), sent_at=1.5, ended_at=6.0, code="UNAVAILABLE"),
        ]
    )
    assert summary.duration_s == 5.0
    assert (summary.num_completed, summary.num_failed) == (2, 1)
    assert summary.requests_per_s == pytest.approx(2 / 5)
    assert summary.output_tokens_per_s == pytest.approx(8 / 5)
    assert summary.total_tokens_per_s == pytest.approx(28 / 5)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (20, 8)
    assert summary.tokens_per_message == 2.0


def test_failures_are_counted_by_code_and_have_no_latencies() -> None:
    failed = Timeline(0.0, 0.0, 1, ended_at=1.0, code="UNAVAILABLE")
    summary = summarize(
        [failed, failed, Timeline(0.0, 0.0, 1, ended_at=1.0, code="INTERNAL"), Timeline(0, 0, 1)]
    )
    assert summary.failures == {"INTERNAL": 1, "UNAVAILABLE": 2}
    assert (summary.num_failed, summary.num_interrupted, summary.num_completed) == (3, 1, 0)
    assert summary.ttft_ms is None
    assert summary.e2e_ms is None


def test_nothing_sent_is_no_error() -> None:
    assert summarize([]).duration_s == 0.0


def test_inter_token_latencies_are_those_of_all_requests_together() -> None:
    summary = summarize([timeline((0.0, 1), (0.1, 1), (0.2, 1)), timeline((0.0, 1), (0.4, 1))])
    assert summary.itl_ms is not None
    assert summary.itl_ms.mean == pytest.approx(200)
    assert summary.itl_ms.median == pytest.approx(100)


def test_goodput_counts_the_requests_that_keep_every_bound() -> None:
    level = ServiceLevel.parse(["ttft_ms=200", "tpot_ms=50", "e2e_ms=1000"])
    good = timeline((0.2, 1), (0.25, 1), ended_at=1.0)
    late_first = timeline((0.21, 1), (0.25, 1))
    slow_tokens = timeline((0.1, 1), (0.151, 1))
    long = timeline((0.1, 1), (0.14, 1), ended_at=1.01)
    one_token = timeline((0.1, 1))
    failed = timeline((0.1, 1), code="INTERNAL", ended_at=2.0)
    summary = summarize([good, late_first, slow_tokens, long, one_token, failed], level)
    assert summary.goodput_requests_per_s == pytest.approx(2 / 2.0)


def test_without_bounds_there_is_no_goodput() -> None:
    assert summarize([timeline((1.0, 1))]).goodput_requests_per_s is None


@pytest.mark.parametrize("text", ["ttft=1", "ttft_ms", "ttft_ms=", "ttft_ms=x", "e2e_ms=0", "tpot_ms=inf"])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="slo"):
        ServiceLevel.parse([text])


def test_a_bound_is_given_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        ServiceLevel.parse(["ttft_ms=1", "ttft_ms=2"])


# The lines of the picture, and the picture where there is something to draw with.


def plotted_timeline(sent_at: float, *times: float) -> Timeline:
    return Timeline(
        sent_at,
        sent_at,
        4,
        token_times=list(times),
        token_counts=[2] * len(times),
        ended_at=times[-1],
        code=OK,
    )


def test_the_share_of_a_value_counts_those_that_do_not_exceed_it() -> None:
    line = cumulative_share([3.0, 1.0, 2.0, 4.0])
    assert (line.x, line.y) == ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75, 1.0])


def test_requests_in_flight_rise_with_a_sending_and_fall_with_an_end() -> None:
    line = in_flight([plotted_timeline(10.0, 13.0), plotted_timeline(11.0, 12.0)])
    assert (line.x, line.y) == ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 1.0, 0.0])


def test_tokens_are_counted_in_the_span_they_came_in() -> None:
    line = token_rate([plotted_timeline(0.0, 1.0, 2.0, 8.0)], num_bins=4)
    assert line.x == [1.0, 3.0, 5.0, 7.0]
    # Two tokens a message in spans of 2 s.
    assert line.y == [1.0, 1.0, 0.0, 1.0]


def test_a_picture_is_drawn_or_refused_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(PlotError, match=r"pip install 'triptych\[bench\]'"):
            check_can_plot()
        return
    check_can_plot()
    draw([plotted_timeline(0.0, 1.0, 2.0), plotted_timeline(0.5, 1.5, 3.0)], "two requests", path)
    assert path.read_bytes().startswith(b"\x89PNG")
