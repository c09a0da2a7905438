"""Outstanding commands: one of a kind, the latest, until it is answered. No network."""

from __future__ import annotations

from coordinator_svc.data_parallel.commands import Commands, Kind
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2


def start(wave: int) -> command_pb2.Command:
    return command_pb2.Command(start_wave=command_pb2.StartWave(wave=wave))


def drain() -> command_pb2.Command:
    return command_pb2.Command(drain=command_pb2.DrainCommand())


def ack(command: command_pb2.Command) -> command_pb2.CommandResult:
    return command_pb2.CommandResult(command_id=command.command_id, ack=command_pb2.CommandAck())


def nack(command: command_pb2.Command, why: str) -> command_pb2.CommandResult:
    return command_pb2.CommandResult(
        command_id=command.command_id, nack=error_pb2.ErrorStatus(code=9, message=why)
    )


class Engine:
    """An engine `a` with a session, and what it was sent and answered."""

    def __init__(self, *, first_id: int = 1) -> None:
        self.commands = Commands(first_id=first_id)
        self.num_wakes = 0
        self.results: list[tuple[int, str]] = []
        self.open(1)

    def open(self, session_id: int) -> None:
        self.session_id = session_id
        self.commands.open("a", session_id, self._wake)

    def put(self, command: command_pb2.Command) -> None:
        wave = command.start_wave.wave

        def on_result(engine_id: str, refusal: error_pb2.ErrorStatus | None) -> None:
            self.results.append((wave, refusal.message if refusal else "taken"))

        assert self.commands.put("a", command, on_result)

    def read(self) -> list[command_pb2.Command]:
        return self.commands.take_unsent("a", self.session_id)

    def _wake(self) -> None:
        self.num_wakes += 1


def test_a_command_is_sent_once_and_its_answer_is_reported() -> None:
    engine = Engine(first_id=70)
    engine.put(start(3))
    [command] = engine.read()
    assert (command.command_id, command.start_wave.wave, engine.num_wakes) == (70, 3, 1)
    assert engine.read() == []
    assert engine.commands.take_result("a", ack(command))
    assert engine.results == [(3, "taken")]
    assert not engine.commands.take_result("a", ack(command))
    assert engine.results == [(3, "taken")]


def test_a_refusal_is_reported_with_its_reason() -> None:
    engine = Engine()
    engine.put(start(3))
    [command] = engine.read()
    engine.commands.take_result("a", nack(command, "too late"))
    assert engine.results == [(3, "too late")]
    assert (engine.commands.num_outstanding, engine.commands.num_refused) == (0, 1)


def test_the_latest_of_a_kind_wins_and_an_answer_to_the_one_before_means_nothing() -> None:
    engine = Engine()
    engine.put(start(3))
    [old] = engine.read()
    engine.put(start(4))
    engine.put(start(5))
    [new] = engine.read()
    assert new.start_wave.wave == 5
    assert not engine.commands.take_result("a", ack(old))
    assert engine.commands.take_result("a", ack(new))
    assert engine.results == [(5, "taken")]


def test_commands_of_different_kinds_stand_side_by_side_in_their_order() -> None:
    engine = Engine()
    engine.put(drain())
    engine.put(start(1))
    assert [command.WhichOneof("command") for command in engine.read()] == ["drain", "start_wave"]
    for wave in range(2, 1000):
        engine.put(start(wave))
    assert engine.commands.num_outstanding == 2


def test_the_same_command_again_keeps_its_id_and_is_sent_again() -> None:
    engine = Engine()
    engine.put(start(3))
    [first] = engine.read()
    engine.put(start(3))
    [again] = engine.read()
    assert again == first


def test_what_has_no_answer_is_sent_again_by_the_next_session_under_its_id() -> None:
    engine = Engine()
    engine.put(start(3))
    [first] = engine.read()
    engine.commands.close("a", 1)
    assert engine.read() == []
    engine.open(2)
    assert engine.read() == [first]


def test_an_ended_session_does_not_close_the_one_after_it() -> None:
    engine = Engine()
    engine.open(2)
    engine.commands.close("a", 1)
    engine.put(start(3))
    assert len(engine.read()) == 1
    assert engine.commands.take_unsent("a", 1) == []


def test_a_dropped_command_is_not_sent() -> None:
    engine = Engine()
    engine.put(start(3))
    engine.commands.drop("a", Kind.WAVE)
    assert engine.read() == []


def test_an_engine_that_is_gone_is_sent_nothing() -> None:
    engine = Engine()
    engine.put(start(3))
    engine.commands.forget("a")
    assert not engine.commands.put("a", start(4))
    assert engine.commands.num_outstanding == 0
