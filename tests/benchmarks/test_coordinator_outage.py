"""Which gaps of which stretches are compared, and what counts as a broken promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.coordinator_outage import broken_promises
from benchmarks.coordinator_outage_rig import Stretch, Verdict, Watched, quantile
from benchmarks.failover_load import StreamRecord, make_cases
from triptych.api.v1 import generate_pb2

KEPT = Verdict(
    num_streams=64,
    num_errors=0,
    num_differing=0,
    calm_gaps=1000,
    calm_p999_s=0.03,
    calm_max_s=0.05,
    outage_gaps=1000,
    outage_p999_s=0.04,
    outage_max_s=0.08,
    violations=(),
)


def stream(*token_instants: float) -> StreamRecord:
    """A stream whose tokens came then."""
    record = StreamRecord(make_cases(1)[0], "stream", sent_at=0.0)
    token = generate_pb2.GenerateResponse(delta=generate_pb2.Delta(token_ids=[7]))
    record.events = [(at, token) for at in token_instants]
    return record


def test_a_gap_belongs_to_the_stretch_in_which_it_ends() -> None:
    watched = Watched(
        stretches=[
            Stretch(is_outage=True, began_at=1.0, ended_at=2.0),
            Stretch(is_outage=False, began_at=2.0, ended_at=3.0),
        ],
        records=[stream(0.5, 0.75, 1.5, 1.75, 2.25), stream(2.0, 2.5, 3.5)],
    )
    assert watched.gaps_s(in_outage=True) == [0.75, 0.25]
    assert watched.gaps_s(in_outage=False) == [0.5, 0.5]


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert quantile([4.0, 1.0], 0.999) == 4.0


def test_a_run_in_which_the_longest_gap_is_at_the_limit_keeps_all_promises() -> None:
    assert broken_promises(Watched(rebuilt_s=[1.0]), KEPT, {"exit_status": 0, "ended_s": 0.1}) == []


@pytest.mark.parametrize(
    ("verdict", "watched", "facts", "words"),
    [
        (replace(KEPT, num_errors=1), Watched(rebuilt_s=[1.0]), {}, "1 streams failed"),
        (replace(KEPT, num_differing=2), Watched(rebuilt_s=[1.0]), {}, "2 streams differ"),
        (replace(KEPT, outage_max_s=0.09), Watched(rebuilt_s=[1.0]), {}, "10 ms longer"),
        (KEPT, Watched(rebuilt_s=[1.0], max_num_lost=1), {}, "did not route to 1 engines"),
        (KEPT, Watched(rebuilt_s=[1.0, 2.5]), {}, "2.50 s to be whole"),
        (KEPT, Watched(rebuilt_s=[1.0]), {"exit_status": 70}, "ended with 70"),
        (KEPT, Watched(rebuilt_s=[1.0]), {"ended_s": 1.5}, "took 1.50 s"),
    ],
)
def test_each_promise_that_is_broken_is_named(
    verdict: Verdict, watched: Watched, facts: dict[str, float], words: str
) -> None:
    (found,) = broken_promises(watched, verdict, facts)
    assert words in found
