"""Where an output spends its time, as its engines and the moves between them report it."""

from __future__ import annotations

from frontend_svc.output.engine_times import EngineTimes, EventKind, Progress

MS = 1_000_000
AT_ONCE = Progress([(EventKind.QUEUED, 0), (EventKind.SCHEDULED, 0)])


class Timed:
    """Times on a clock that stands still, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.times = EngineTimes(lambda: self.now_ms * MS)

    def at(self, now_ms: int, progress: Progress) -> None:
        self.now_ms = now_ms
        self.times.note(progress)

    def begin(self, now_ms: int, num_attempts: int = 0) -> None:
        self.now_ms = now_ms
        self.times.begin(num_attempts, f"engine-{num_attempts}")

    def end(self, now_ms: int) -> tuple[float, ...]:
        self.now_ms = now_ms
        self.times.end()
        return tuple(spent_ns / MS for spent_ns in self.times.spent_ns)


def test_times_follow_each_other_from_the_sending_to_the_end():
    one = Timed()
    one.begin(100)
    # In one message, read 20 ms after the first token of a prompt that took 30 ms.
    one.at(200, Progress([(EventKind.QUEUED, 95 * MS), (EventKind.SCHEDULED, 50 * MS)], 5 * MS, 30 * MS))
    assert one.end(260) == (50, 30, 80)
    # 5 ms more than the engine had it.
    assert one.times.boundary_ns == 5 * MS
    assert [(stay.start_ns / MS, stay.end_ns / MS) for stay in one.times.stays] == [
        (100, 150), (150, 180), (180, 260),
    ]  # fmt: skip
    assert [(moment.name, moment.at_ns / MS) for moment in one.times.moments] == [
        ("scheduled", 150), ("first_token", 180),
    ]  # fmt: skip
    # What comes after the end changes nothing.
    one.at(300, Progress([(EventKind.SCHEDULED, 0)], 0, 0))
    assert one.end(400) == (50, 30, 80)


def test_the_first_token_may_come_later_than_the_events():
    one = Timed()
    one.begin(0)
    one.at(30, Progress([(EventKind.QUEUED, 20 * MS), (EventKind.SCHEDULED, 10 * MS)]))
    one.at(100, Progress([], 2 * MS, 70 * MS))
    assert one.end(110) == (20, 70, 20)


def test_preemptions_are_counted_and_stay_in_the_phase():
    one = Timed()
    one.begin(0)
    one.at(10, AT_ONCE)
    one.at(20, Progress([(EventKind.PREEMPTED, 5 * MS)]))
    one.at(30, Progress([], 0))
    one.at(40, Progress([(EventKind.PREEMPTED, 5 * MS), (EventKind.RESUMED, 2 * MS)]))
    assert [(moment.name, moment.at_ns / MS) for moment in one.times.moments] == [
        ("scheduled", 10), ("preempted", 15), ("first_token", 30), ("preempted", 35), ("resumed", 38),
    ]  # fmt: skip
    assert (one.end(60), one.times.num_preemptions) == ((10, 20, 30), 2)


def test_an_engine_that_reports_no_events_has_no_queue():
    one = Timed()
    one.begin(0)
    one.at(50, Progress([], 10 * MS))
    assert one.end(60) == (0, 40, 20)


def test_an_output_that_moves_sums_what_it_spends_in_each_engine_and_nothing_between_them():
    one = Timed()
    one.begin(0)
    one.at(10, AT_ONCE)
    one.at(20, Progress([], 0))
    assert one.end(50) == (10, 10, 30)
    one.begin(1000, num_attempts=1)
    one.at(1001, AT_ONCE)
    one.at(1003, Progress([], 0))
    assert (one.end(1007), one.times.num_migrations) == ((11, 12, 34), 1)
    stays = [(stay.phase, stay.engine_id) for stay in one.times.stays]
    assert stays == [(phase, engine) for engine in ("engine-0", "engine-1") for phase in range(3)]
    # Of the output, not of the engine.
    assert [moment.name for moment in one.times.moments].count("first_token") == 1


def test_an_output_that_was_begun_elsewhere_counts_from_its_queueing():
    one = Timed()
    one.begin(1000)
    one.at(1001, Progress([(EventKind.QUEUED, 501 * MS), (EventKind.SCHEDULED, 401 * MS)], 0, 100 * MS))
    assert one.end(1010) == (100, 100, 310)


def test_ages_beyond_the_sending_take_nothing_off():
    one = Timed()
    one.begin(100)
    one.at(101, Progress([(EventKind.SCHEDULED, 50 * MS)], 80 * MS))
    assert one.end(103) == (0, 0, 3)
