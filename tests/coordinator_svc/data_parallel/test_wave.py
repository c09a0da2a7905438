"""The rules by which engines are told to begin a wave, one by one."""

from __future__ import annotations

from coordinator_svc.data_parallel.wave import START_RETRY_S, Stand, Start, Wave


def wave_of(**stands: Stand) -> Wave:
    wave = Wave()
    for engine_id, stand in stands.items():
        wave.report(engine_id, stand)
    return wave


def idle(wave: int = 1) -> Stand:
    return Stand(wave, is_running=False)


def running(wave: int = 1, *, asks: bool = False) -> Stand:
    return Stand(wave, is_running=True, asks=asks)


def test_nobody_is_told_anything_while_nobody_asks():
    wave = wave_of(a=idle(), b=running())
    assert wave.due(0.0) == []
    assert wave.next_at() is None


def test_all_but_those_that_run_are_told_when_one_asks():
    wave = wave_of(a=running(3, asks=True), b=idle(3), c=running(3), d=idle(2))
    assert wave.due(0.0) == [Start("b", 3, ("a", "c")), Start("d", 3, ("a", "c"))]


def test_who_has_no_process_group_is_told_nothing():
    wave = wave_of(a=running(asks=True), b=Stand(1, is_running=False, is_apart=True))
    assert wave.due(0.0) == []


def test_who_was_told_is_not_told_again_before_a_while():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    assert wave.due(START_RETRY_S / 2) == []
    assert wave.next_at() == START_RETRY_S
    assert [start.engine_id for start in wave.due(START_RETRY_S)] == ["b"]


def test_who_has_taken_a_start_is_not_told_again():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    assert wave.next_at() is None
    assert wave.due(100.0) == []


def test_who_has_refused_is_told_again_after_a_while():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=False)
    assert wave.due(0.0) == []
    assert [start.engine_id for start in wave.due(START_RETRY_S)] == ["b"]


def test_who_has_taken_a_start_and_does_not_run_is_told_again():
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


def test_who_has_another_session_is_told_at_once():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    wave.reconnect("b")
    assert [start.engine_id for start in wave.due(0.0)] == ["b"]


def test_the_next_wave_is_told_anew():
    wave = wave_of(a=running(asks=True), b=idle())
    wave.due(0.0)
    wave.answer("b", 1, is_taken=True)
    wave.report("b", idle(2))
    wave.report("a", running(2, asks=True))
    assert wave.due(0.0) == [Start("b", 2, ("a",))]


def test_a_late_question_does_not_begin_the_wave_after_it():
    # One rank has told of the end of the wave, the other's word from its beginning has come only now.
    wave = wave_of(b=idle(2), a=running(1, asks=True))
    assert wave.due(0.0) == []


def test_who_is_beyond_the_wave_that_is_asked_for_is_told_nothing():
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


def test_a_hint_at_who_is_no_member_does_nothing():
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


def test_a_start_that_was_sent_makes_nobody_run():
    wave = wave_of(a=idle(), b=idle())
    wave.hint("a", 1)
    wave.due(0.0)
    assert not wave.is_running
