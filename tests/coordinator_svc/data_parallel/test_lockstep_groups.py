"""A lockstep group: reports and hints in, commands and a state for frontends out. No network."""

from __future__ import annotations

import pytest

from coordinator_svc.data_parallel.commands import Commands
from coordinator_svc.data_parallel.lockstep_groups import LockstepGroups
from coordinator_svc.data_parallel.wave import START_RETRY_S, Start, Wave, WaveStatus
from tests.coordinator_svc.fakes import registration
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import InvalidArgument

LOADING, READY = member_pb2.MEMBER_STATE_LOADING, member_pb2.MEMBER_STATE_READY
WEIGHTS_READY = command_pb2.SCALING_NOTICE_KIND_WEIGHTS_READY


class Engines:
    """The engines of group `g` by id, at groups with a clock that stands still."""

    def __init__(self, *engine_ids: str, first_generation: int = 1) -> None:
        self.clock = FakeClock(10.0)
        self.commands = Commands()
        self.groups = LockstepGroups(self.commands, self.clock, first_generation=first_generation)
        self.engine_ids = engine_ids
        for rank, engine_id in enumerate(engine_ids):
            self.commands.open(engine_id, 1, lambda: None)
            self.join(engine_id, dp_rank=rank)

    def join(self, engine_id: str, **fields: int) -> None:
        host, port = f"host-{engine_id}", 7000
        facts = {"dp_group": "g", "dp_size": len(self.engine_ids), "lockstep": True, "store_port": port}
        one = registration(engine_id=engine_id, host=host, parallel_config_hash="h", **facts, **fields)
        self.groups.join(one)

    def report(self, engine_id: str, **fields: int | bool) -> None:
        """A report of a READY engine that is paused, but for what `fields` say."""
        facts = {"state": READY, "wave_complete": True, **fields}
        self.groups.report(engine_id, coordinator_pb2.EngineReport(**facts))  # type: ignore[arg-type]

    def load(self, engine_id: str) -> None:
        report = coordinator_pb2.EngineReport(state=LOADING, wave=1, wave_complete=True)
        report.scaling_notice.kind = WEIGHTS_READY
        self.groups.report(engine_id, report)

    def read(self, engine_id: str) -> list[command_pb2.Command]:
        return self.commands.take_unsent(engine_id, 1)

    def take(self, *engine_ids: str) -> list[command_pb2.Command]:
        """What these engines are sent, which they ack."""
        taken = []
        for engine_id in engine_ids:
            for command in self.read(engine_id):
                taken.append(command)
                ack = command_pb2.CommandResult(command_id=command.command_id, ack=command_pb2.CommandAck())
                assert self.commands.take_result(engine_id, ack)
                self.groups.answered(engine_id)
        return taken

    @property
    def state(self) -> member_pb2.WaveState:
        [state] = self.groups.states()
        return state


def formed(*engine_ids: str, wave: int = 1) -> Engines:
    """Engines in generation 1, between two waves."""
    engines = Engines(*engine_ids)
    for engine_id in engine_ids:
        engines.report(engine_id, generation=1, wave=wave)
    return engines


def test_loaded_engines_get_the_rendezvous_address_and_then_the_order_to_change_over() -> None:
    engines = Engines("a", "b")
    engines.load("a")
    assert engines.read("a") == []
    engines.load("b")
    prepares = [command.prepare_scale for command in engines.take("a", "b")]
    assert [(prepare.rank, prepare.new_size, prepare.generation) for prepare in prepares] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert {(one.rendezvous.master_address, one.rendezvous.store_port) for one in prepares} == {
        ("host-a", 7000)
    }
    assert prepares[0].rendezvous.parallel_config_hash == "h"
    assert [command.commit_scale.generation for command in engines.take("a", "b")] == [1, 1]
    for engine_id in ("a", "b"):
        engines.report(engine_id, generation=1, wave=1)
    assert engines.state.generation == 1


def test_a_report_of_an_engine_that_asks_starts_the_others_at_once() -> None:
    engines = formed("a", "b", "c")
    engines.report("a", generation=1, wave=1, wave_complete=False, start_wave_needed=True)
    assert engines.read("a") == []
    for engine_id in ("b", "c"):
        [command] = engines.read(engine_id)
        assert (command.start_wave.wave, list(command.start_wave.exclude)) == (1, ["a"])


def test_a_start_that_is_not_answered_is_sent_again_in_time_and_one_that_is_taken_is_not() -> None:
    engines = formed("a", "b", "c")
    engines.report("a", generation=1, wave=1, wave_complete=False, start_wave_needed=True)
    engines.take("c")
    [first] = engines.read("b")
    assert engines.groups.next_at() == engines.clock.now() + START_RETRY_S
    engines.clock.advance(START_RETRY_S)
    engines.groups.step_all()
    assert engines.read("b") == [first]
    assert engines.read("c") == []


def test_frontends_learn_from_an_engine_only_that_a_wave_runs() -> None:
    engines = formed("a", "b")
    version = engines.groups.version
    hint = coordinator_pb2.FirstRequestWhilePaused(dp_group="g", engine_id="a", wave=1)
    assert engines.groups.hint(hint)
    assert [command.start_wave.wave for command in engines.take("a", "b")] == [1, 1]
    assert not engines.state.engines_running
    assert engines.groups.version == version
    engines.report("b", generation=1, wave=1, wave_complete=False)
    assert engines.state.engines_running
    assert [state.wave for state in engines.groups.states(since=version)] == [1]
    engines.report("b", generation=1, wave=2)
    assert (engines.state.engines_running, engines.state.wave) == (False, 2)


def test_a_hint_about_an_engine_or_group_that_is_not_there_does_nothing() -> None:
    engines = formed("a", "b")
    for group, engine_id in (("g", "x"), ("other", "a")):
        hint = coordinator_pb2.FirstRequestWhilePaused(dp_group=group, engine_id=engine_id, wave=1)
        assert not engines.groups.hint(hint)
    assert engines.take("a", "b") == []


def test_the_wave_number_is_that_of_the_engines_after_a_restart_and_stays_when_all_are_gone() -> None:
    restarted = Engines()
    restarted.engine_ids = ("a", "b")
    restarted.join("a", dp_rank=0, wave=40)
    restarted.join("b", dp_rank=1, wave=41)
    assert restarted.state.wave == 41
    for engine_id in ("a", "b"):
        restarted.groups.leave(engine_id, has_ended=True)
    restarted.join("a", dp_rank=0, engine_epoch=12, wave=1)
    assert restarted.state.wave == 41


def test_engines_that_lost_their_group_are_ordered_to_form_the_next() -> None:
    engines = formed("a", "b", "c")
    engines.groups.lose("a")
    engines.report("b", generation=0, wave=1)
    engines.report("c", generation=0, wave=1)
    assert engines.take("b", "c") == []
    engines.clock.advance(0.3)
    engines.groups.step_all()
    assert [command.prepare_scale.rank for command in engines.take("b", "c")] == [0, 1]


def test_an_order_that_holds_no_more_is_not_sent() -> None:
    engines = formed("a", "b")
    engines.groups.resize("g", 1, ["b"])
    engines.groups.resize("g", 2, [])
    [command] = engines.read("a")
    assert command.WhichOneof("command") == "abort_scale"


def test_an_order_to_leave_has_no_rendezvous_address() -> None:
    engines = formed("a", "b")
    engines.groups.resize("g", 1, ["b"])
    [command] = engines.read("b")
    assert command.prepare_scale.leave
    assert not command.prepare_scale.HasField("rendezvous")


def test_operators_see_each_group() -> None:
    engines = formed("a", "b", wave=7)
    status = engines.groups.status()
    assert {key: status[f"group.g.{key}"] for key in ("wave", "running", "generation", "size")} == {
        "wave": 7,
        "running": 0,
        "generation": 1,
        "size": 2,
    }
    engines.groups.resize("g", 1, [])
    assert engines.groups.status()["group.g.target_size"] == 1
    assert engines.groups.status()["group.g.phase"] == "preparing"


def test_engines_in_no_group_are_sent_nothing() -> None:
    engines = Engines()
    engines.groups.report("x", coordinator_pb2.EngineReport(start_wave_needed=True, wave=3))
    engines.groups.lose("x")
    assert engines.groups.states() == []
    assert engines.groups.next_at() is None


@pytest.mark.parametrize("field", ["wave", "generation"])
def test_no_engine_can_push_its_group_to_where_numbers_end(field: str) -> None:
    engines = formed("a", "b")
    for value in (2**49, 2**62):
        with pytest.raises(InvalidArgument, match=rf"{field} is {value}, the limit is \d+") as refused:
            engines.groups.check_ahead("g", "report", **{"wave": 1, "generation": 1, field: value})
        assert [name for name, _ in refused.value.violations] == [f"report.{field}"]
    pushed = {"wave": 1, "generation": 1, field: 2**48}
    engines.groups.check_ahead("g", "report", **pushed)
    engines.report("a", **pushed)
    # A start that counts on from there is accepted, by this coordinator and by one that has just started.
    on = {**pushed, field: 2**48 + 1000}
    engines.groups.check_ahead("g", "report", **on)
    LockstepGroups(Commands(), FakeClock()).check_ahead("g", "report", **on)


# The rules by which engines are started on a wave, one by one.


def wave_of(**stands: WaveStatus) -> Wave:
    wave = Wave()
    for engine_id, stand in stands.items():
        wave.report(engine_id, stand)
    return wave


def idle(wave: int = 1) -> WaveStatus:
    return WaveStatus(wave, is_running=False)


def running(wave: int = 1, *, asks: bool = False) -> WaveStatus:
    return WaveStatus(wave, is_running=True, asks=asks)


def test_no_engine_is_started_while_none_asks():
    wave = wave_of(a=idle(), b=running())
    assert wave.due(0.0) == []
    assert wave.next_at() is None


def test_all_engines_but_running_ones_are_started_when_one_asks():
    wave = wave_of(a=running(3, asks=True), b=idle(3), c=running(3), d=idle(2))
    assert wave.due(0.0) == [Start("b", 3, ("a", "c")), Start("d", 3, ("a", "c"))]


def test_an_engine_without_a_process_group_is_not_started():
    wave = wave_of(a=running(asks=True), b=WaveStatus(1, is_running=False, is_apart=True))
    assert wave.due(0.0) == []


def test_a_start_is_not_sent_again_before_a_while():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    assert wave.due(START_RETRY_S / 2) == []
    assert wave.next_at() == START_RETRY_S
    assert [start.engine_id for start in wave.due(START_RETRY_S)] == ["b"]


def test_an_engine_that_has_accepted_a_start_is_not_started_again():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    assert wave.next_at() is None
    assert wave.due(100.0) == []


def test_an_engine_that_has_refused_is_started_again_after_a_while():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=False)
    assert wave.due(0.0) == []
    assert [start.engine_id for start in wave.due(START_RETRY_S)] == ["b"]


def test_an_engine_that_has_accepted_a_start_and_does_not_run_is_started_again():
    # It kept the start for after the wave it was in, and changed over to another generation at the end of it.
    wave = wave_of(a=running(3, asks=True), b=running(2))
    wave.report("b", idle(3))
    wave.due(0.0)
    wave.answer("b", 3, is_taken=True)
    wave.report("b", idle(3))
    assert [start.engine_id for start in wave.due(0.0)] == ["b"]


def test_an_answer_to_another_wave_means_nothing():
    wave = wave_of(a=running(2, asks=True), b=idle(2))
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    assert len(wave.due(START_RETRY_S)) == 1


def test_an_engine_with_another_session_is_started_at_once():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    wave.reconnect("b")
    assert [start.engine_id for start in wave.due(0.0)] == ["b"]


def test_the_next_wave_is_started_anew():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    wave.report("b", idle(2))
    wave.report("a", running(2, asks=True))
    assert wave.due(0.0) == [Start("b", 2, ("a",))]


def test_a_late_question_does_not_begin_the_wave_after_it():
    # One rank has reported the end of the wave, the other's report of its beginning comes only now.
    wave = wave_of(b=idle(2), a=running(1, asks=True))
    assert wave.due(0.0) == []


def test_an_engine_beyond_the_requested_wave_is_not_started():
    wave = wave_of(a=running(2, asks=True), b=idle(3), c=idle(2))
    assert [start.engine_id for start in wave.due(0.0)] == ["c"]


def test_a_hint_wakes_all_while_nothing_runs():
    wave = wave_of(a=idle(4), b=idle(4))
    wave.hint("a", 4)
    assert [(start.engine_id, start.wave) for start in wave.due(0.0)] == [("a", 4), ("b", 4)]


def test_a_late_hint_does_nothing():
    wave = wave_of(a=idle(4), b=idle(4))
    wave.hint("a", 3)
    assert wave.due(0.0) == []


def test_a_hint_does_nothing_while_a_wave_runs():
    wave = wave_of(a=running(4), b=idle(4))
    wave.hint("a", 4)
    assert wave.due(0.0) == []


def test_a_hint_at_an_engine_that_is_no_member_does_nothing():
    wave = wave_of(a=idle(4))
    wave.hint("x", 4)
    assert wave.due(0.0) == []


def test_a_hint_of_the_future_begins_no_more_than_the_next_wave():
    wave = wave_of(a=idle(4))
    wave.hint("a", 2**63)
    assert [start.wave for start in wave.due(0.0)] == [4]


def test_a_hint_is_over_with_its_wave_with_a_refusal_and_with_its_engine():
    for end in ("wave", "refusal", "engine"):
        wave = wave_of(a=idle(4), b=idle(4))
        wave.hint("a", 4)
        if end == "wave":
            wave.report("b", idle(5))
        elif end == "refusal":
            wave.answer("b", 4, is_taken=False)
        else:
            wave.leave("a")
        assert wave.due(0.0) == [], end


def test_the_number_never_falls():
    wave = wave_of(a=idle(7))
    wave.report("a", idle(3))
    assert wave.number == 7
    wave.leave("a")
    assert wave.number == 7


def test_a_coordinator_that_starts_anew_takes_its_number_from_the_engines():
    wave = Wave()
    assert wave.number == 0
    wave.report("a", idle(3))
    wave.report("b", idle(8))
    assert wave.number == 8


def test_it_runs_while_any_engine_says_that_it_does():
    wave = wave_of(a=idle(), b=idle())
    assert not wave.is_running
    wave.report("b", running())
    assert wave.is_running
    wave.leave("b")
    assert not wave.is_running


def test_a_sent_start_alone_does_not_make_the_wave_run():
    wave = wave_of(a=idle(), b=idle())
    wave.hint("a", 1)
    wave.due(0.0)
    assert not wave.is_running
