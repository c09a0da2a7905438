"""What a frontend remembers of a session while its streams come and go."""

from __future__ import annotations

from frontend_svc.engines.connection.session import EngineSession
from triptych.engine.v1 import add_pb2, engine_pb2


def entry(handle: int, *, num_bytes: int = 4, attempt: int = 0) -> add_pb2.AddEntry:
    return add_pb2.AddEntry(handle=handle, attempt=attempt, prompt_token_ids=bytes(num_bytes))


def begun(*entries: add_pb2.AddEntry) -> EngineSession:
    session = EngineSession()
    session.begin(7, is_resumable=True)
    session.add(entries)
    return session


def test_what_has_no_answer_is_sent_again_in_frames_of_a_limited_size():
    large = 7 * 1024 * 1024
    session = begun(*(entry(handle, num_bytes=large) for handle in range(5)), entry(9))
    frames = [[one.handle for one in message.add.entries] for message in session.unanswered()]
    assert frames == [[0, 1], [2, 3], [4, 9]]


def test_moved_requests_are_counted_until_the_engine_has_ended_them():
    session = begun(entry(1), entry(2, attempt=3))
    assert session.num_moved == 0
    session.move_all()
    assert session.num_moved == 2
    *_, abort = session.unanswered()
    assert (list(abort.abort.handles), list(abort.abort.attempts)) == ([1, 2], [0, 3])
    assert abort.abort.reason == engine_pb2.ABORT_REASON_MIGRATED
    session.close([1, 2])
    assert session.num_moved == 0
