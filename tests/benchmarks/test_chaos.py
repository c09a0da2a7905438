"""Which gaps of which stretches are compared, and what counts as a broken promise."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest

from benchmarks.rig.outage import Stretch, Verdict, Watched
from benchmarks.rig.streams import Flow, StreamRecord, make_cases
from benchmarks.scenarios.chaos import EngineStrikes, coordinator_shortfalls, engine_shortfalls
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


async def watched(*records: StreamRecord, rebuilt_s: float = 1.0, num_lost: int = 0) -> Watched:
    flow = Flow(grpc.aio.insecure_channel("127.0.0.1:1"), make_cases(1), "test")
    flow.load.records = list(records)
    return Watched(flow, rebuilt_s=[1.0, rebuilt_s], max_num_lost=num_lost)


async def test_a_gap_belongs_to_the_stretch_in_which_it_ends() -> None:
    seen = await watched(stream(0.5, 0.75, 1.5, 1.75, 2.25), stream(2.0, 2.5, 3.5))
    seen.stretches = [
        Stretch(is_outage=True, began_at=1.0, ended_at=2.0),
        Stretch(is_outage=False, began_at=2.0, ended_at=3.0),
    ]
    assert seen.gaps_s(in_outage=True) == [0.75, 0.25]
    assert seen.gaps_s(in_outage=False) == [0.5, 0.5]


async def test_a_run_whose_longest_gap_is_at_the_limit_keeps_all_promises() -> None:
    assert coordinator_shortfalls(await watched(), KEPT, {"exit_status": 0, "ended_s": 0.1}) == []


@pytest.mark.parametrize(
    ("verdict", "rebuilt_s", "num_lost", "facts", "words"),
    [
        (replace(KEPT, num_errors=1), 1.0, 0, {}, "1 streams failed"),
        (replace(KEPT, num_differing=2), 1.0, 0, {}, "2 streams differ"),
        (replace(KEPT, outage_max_s=0.09), 1.0, 0, {}, "10 ms longer"),
        (KEPT, 1.0, 1, {}, "did not route to 1 engines"),
        (KEPT, 2.5, 0, {}, "2.50 s to be whole"),
        (KEPT, 1.0, 0, {"exit_status": 70}, "ended with 70"),
        (KEPT, 1.0, 0, {"ended_s": 1.5}, "took 1.50 s"),
    ],
)
async def test_each_broken_promise_of_an_outage_is_named(
    verdict: Verdict, rebuilt_s: float, num_lost: int, facts: dict[str, float], words: str
) -> None:
    (found,) = coordinator_shortfalls(await watched(rebuilt_s=rebuilt_s, num_lost=num_lost), verdict, facts)
    assert words in found


def test_an_engine_that_is_lost_must_be_noticed_and_its_streams_go_on_elsewhere() -> None:
    # The longest silence after the strike at 1.0 ends at 1.9.
    strikes = EngineStrikes(num_moved=[3], detected_s=[0.02], struck=[(1.0, [stream(0.9, 1.05, 1.9)])])
    assert strikes.recovered_s == [pytest.approx(0.9)]
    assert engine_shortfalls("engine kill", KEPT, strikes, 1.0) == []
    late = replace(strikes, num_moved=[0], detected_s=[0.3])
    assert engine_shortfalls("engine kill", KEPT, late, 1.0) == [
        "a strike moved nothing",
        "detection took 0.300 s",
    ]
