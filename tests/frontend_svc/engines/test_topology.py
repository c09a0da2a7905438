"""What a frontend holds of a coordinator's messages, and whom it believes."""

from __future__ import annotations

from frontend_svc.engines.routing.account import LoadReport
from frontend_svc.engines.topology import CoordinatorFence, Topology
from tests.frontend_svc.engines.test_coordinator import GONE, delta, member, snapshot
from triptych.coordinator.v1 import member_pb2

UNREPORTED = member_pb2.MEMBER_STATE_UNREPORTED


def load(engine_id: str, step_number: int, num_running: int) -> member_pb2.EngineLoad:
    return member_pb2.EngineLoad(
        engine_id=engine_id, engine_epoch=7, step_number=step_number, num_running=num_running
    )


def wave(number: int, *, is_running: bool = False, group: str = "g") -> member_pb2.WaveState:
    return member_pb2.WaveState(dp_group=group, wave=number, engines_running=is_running)


def test_topology_follows_snapshots_and_deltas():
    topology = Topology()
    assert topology.apply(snapshot(member("a", "h:1"), member("b", "h:2")))
    assert topology.endpoints() == ["h:1", "h:2"]
    assert not topology.apply(delta(2))
    assert topology.apply(delta(3, added=[member("c", "h:3")], removed_engine_ids=["a"]))
    assert topology.apply(delta(4, updated=[member("b", "h:9"), member("c", "h:3", GONE)]))
    assert (topology.endpoints(), topology.version, topology.coordinator_epoch) == (["h:9"], 4, 9)


def test_engines_without_all_of_the_labels_are_not_there():
    label = member_pb2.Label(key="zone", value="a")
    everybody = snapshot(
        member("0", "n1:1", dp_rank=0, labels=[label]),
        member("1", "n1:2", dp_rank=1),
        member("2", "n2:1", dp_rank=2, host="other", labels=[label], dp_group="g"),
    )
    for wanted, endpoints in (
        ({}, ["n1:1", "n1:2", "n2:1"]),
        ({"dp_rank": "1"}, ["n1:2"]),
        ({"host": "n1"}, ["n1:1", "n1:2"]),
        ({"host": "other"}, ["n2:1"]),
        ({"zone": "a"}, ["n1:1", "n2:1"]),
        ({"zone": "a", "dp_group": "g"}, ["n2:1"]),
        ({"zone": "b"}, []),
    ):
        topology = Topology(wanted)
        topology.apply(everybody)
        assert topology.endpoints() == endpoints
    # A label that an engine has lost takes it away.
    topology = Topology({"zone": "a"})
    topology.apply(everybody)
    assert topology.apply(delta(2, updated=[member("0", "n1:1")]))
    assert topology.endpoints() == ["n2:1"]


def test_loads_are_told_once_by_endpoint_and_none_of_an_unreported_engine():
    topology = Topology()
    loaded = member("a", "h:1")
    loaded.load.CopyFrom(load("a", 1, 5))
    topology.apply(snapshot(loaded, member("b", "h:2")))
    assert topology.take_loads() == {"h:1": LoadReport(7, 1, 5)}
    assert topology.take_loads() == {}
    topology.apply(delta(2, loads=[load("b", 9, 2), load("stranger", 1, 1)]))
    topology.apply(delta(3, updated=[member("a", "h:1", UNREPORTED)]))
    assert topology.take_loads() == {"h:2": LoadReport(7, 9, 2), "h:1": None}


def test_a_paused_lockstep_group_is_hinted_once_a_wave_and_others_never():
    topology = Topology()
    members = [member(str(rank), f"h:{rank}", dp_group="g", lockstep=True) for rank in range(2)]
    dense = member("dense", "h:9", dp_group="d")
    topology.apply(snapshot(*members, dense, waves=[wave(3), wave(3, group="d")]))
    assert topology.hint("dense") is None and topology.hint("stranger") is None
    first = topology.hint("1")
    assert first is not None and (first.dp_group, first.engine_id, first.wave) == ("g", "1", 3)
    assert topology.hint("1") is None and topology.hint("0") is None
    topology.apply(delta(2, waves=[wave(3, is_running=True)]))
    assert topology.hint("0") is None
    topology.apply(delta(3, waves=[wave(4)]))
    later = topology.hint("0")
    assert later is not None and later.wave == 4


def test_a_wave_never_goes_back():
    topology = Topology()
    topology.apply(snapshot(member("0", "h:0", dp_group="g", lockstep=True), waves=[wave(4)]))
    topology.apply(delta(2, waves=[wave(3, is_running=True)]))
    hint = topology.hint("0")
    assert hint is not None and hint.wave == 4


def test_a_coordinator_of_a_lower_epoch_is_believed_when_the_other_was_silent_for_a_lease():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=2.0, now=0.0)
    fence.note_end(now=0.0)
    assert not fence.admits(4, lease_s=1.0, now=1.9)
    assert fence.admits(5, lease_s=2.0, now=1.95)
    fence.note_end(now=2.0)
    assert not fence.admits(4, lease_s=1.0, now=2.0)
    assert fence.admits(9, lease_s=2.0, now=2.0)
    fence.note_end(now=2.0)
    assert not fence.admits(5, lease_s=1.0, now=2.0)
    # The end of a session in which it was not heard says nothing of it.
    fence.note_end(now=3.0)
    assert not fence.has_lapsed(now=3.9) and fence.has_lapsed(now=4.0)
    assert fence.admits(5, lease_s=1.0, now=4.0)


def test_the_lease_is_the_one_that_the_believed_coordinator_has_told():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=30.0, now=0.0)
    fence.note_end(now=0.0)
    assert not fence.has_lapsed(now=29.9) and fence.has_lapsed(now=30.0)
    assert fence.admits(6, lease_s=0.5, now=30.0)
    fence.note_end(now=30.0)
    assert not fence.admits(5, lease_s=30.0, now=30.4) and fence.has_lapsed(now=30.5)


def test_a_coordinator_is_heard_for_as_long_as_its_session_is_open():
    fence = CoordinatorFence()
    assert fence.admits(5, lease_s=3.0, now=0.0)
    assert not fence.admits(4, lease_s=3.0, now=300.0)
    fence.note_end(now=300.0)
    assert not fence.has_lapsed(now=302.9) and fence.has_lapsed(now=303.0)
