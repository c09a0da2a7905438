"""The lines of the picture, and the picture where there is something to draw with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launcher.bench.metrics import OK, Timeline
from launcher.bench.plot import PlotError, check_can_plot, cumulative_share, draw, in_flight, token_rate


def timeline(sent_at: float, *times: float) -> Timeline:
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
    line = in_flight([timeline(10.0, 13.0), timeline(11.0, 12.0)])
    assert (line.x, line.y) == ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 1.0, 0.0])


def test_tokens_are_counted_in_the_span_they_came_in() -> None:
    line = token_rate([timeline(0.0, 1.0, 2.0, 8.0)], num_bins=4)
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
    draw([timeline(0.0, 1.0, 2.0), timeline(0.5, 1.5, 3.0)], "two requests", path)
    assert path.read_bytes().startswith(b"\x89PNG")
