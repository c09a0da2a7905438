"""Engines that break one rule each, with the name of the case that is to notice it."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.contract.scripted_engine import EOS_TOKEN_ID, Ended, Link, Running, ScriptedEngine, Session, pack
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, step_pb2


class _TakesASecondHello(ScriptedEngine):
    def on_second_hello(self, session: Session) -> None:
        pass


class _RepeatsAllFeatures(ScriptedEngine):
    def common_features(self, hello: session_pb2.Hello) -> list[str]:
        return list(hello.features)


class _TakesAnyId(ScriptedEngine):
    def check_hello(self, hello: session_pb2.Hello) -> None:
        pass


class _ReadsNamesAlone(ScriptedEngine):
    def common_features(self, hello: session_pb2.Hello) -> list[str]:
        return [name for name in hello.features if name == "resume"]


class _EndsAtUnknownMessages(ScriptedEngine):
    def on_unknown(self, session: Session) -> None:
        session.end(Ended(grpc.StatusCode.INVALID_ARGUMENT, "", "unknown message"))


class _RejectsUnknownFields(ScriptedEngine):
    def check_fields(self, entry: add_pb2.AddEntry) -> None:
        super().check_fields(entry)
        if len(UnknownFieldSet(entry)):
            raise Ended(grpc.StatusCode.INVALID_ARGUMENT, "", "unknown field")


class _TakesAnySize(ScriptedEngine):
    max_taken_bytes = -1


class _KeepsOlderSessions(ScriptedEngine):
    def end_older(self, hello: session_pb2.Hello, resumed: Session | None) -> None:
        pass


class _EndsAllFrontends(ScriptedEngine):
    def end_older(self, hello: session_pb2.Hello, resumed: Session | None) -> None:
        for session in self.sessions:
            if session is not resumed and session.hello.session_id == hello.session_id:
                session.end()
        super().end_older(hello, resumed)


class _SkipsNumbers(Session):
    def send(self, **content: Any) -> None:
        self.last_seq += "heartbeat" in content
        super().send(**content)

    def next_message(self, link: Link) -> bytes | None:
        if link.sent < self.last_seq and link.sent + 1 not in self._kept:
            link.sent += 1
        return super().next_message(link)


class _NumbersWithGaps(ScriptedEngine):
    session_type = _SkipsNumbers


class _SendsAllTheSame(Session):
    is_full = False  # type: ignore[assignment]


class _StepsWithAFullWindow(ScriptedEngine):
    session_type = _SendsAllTheSame


class _WaitsForever(Session):
    def on_beat(self) -> None:
        pass


class _KeepsSlowReaders(ScriptedEngine):
    session_type = _WaitsForever


class _QueuesEverything(Session):
    def check_unsent(self) -> None:
        pass


class _QueuesWithoutLimit(ScriptedEngine):
    session_type = _QueuesEverything


class _ForgetsWhatItSent(Session):
    def next_message(self, link: Link) -> bytes | None:
        message = super().next_message(link)
        if message is not None and link.sent > 1:
            self.acknowledge(link.sent - 1)
        return message


class _KeepsNothing(ScriptedEngine):
    session_type = _ForgetsWhatItSent


class _EncodesAgain(Session):
    last_sent = 0

    def next_message(self, link: Link) -> bytes | None:
        message = super().next_message(link)
        if message is None:
            return None
        encoded = engine_pb2.ConnectResponse.FromString(message)
        if link.sent <= self.last_sent and encoded.HasField("step"):
            encoded.step.step_number += 1
        self.last_sent = max(self.last_sent, link.sent)
        return encoded.SerializeToString()


class _SendsOtherBytesAgain(ScriptedEngine):
    session_type = _EncodesAgain


class _GivesNoReason(ScriptedEngine):
    def resumed_by(self, hello: session_pb2.Hello) -> Session | session_pb2.ResumeRefusal:
        found = super().resumed_by(hello)
        return found if isinstance(found, Session) else session_pb2.RESUME_REFUSAL_UNSPECIFIED


class _ResumesForAnyEpoch(ScriptedEngine):
    def is_own_epoch(self, engine_epoch: int) -> bool:
        return True


class _ResumesForAnyFrontend(ScriptedEngine):
    def is_same_session(self, one: session_pb2.Hello, other: session_pb2.Hello) -> bool:
        return one.session_id == other.session_id


class _HasEverything(Session):
    def has_all_after(self, last_seq: int) -> bool:
        return True

    def next_message(self, link: Link) -> bytes | None:
        while link.sent < self.last_seq and link.sent + 1 not in self._kept:
            link.sent += 1
        return super().next_message(link)


class _ResumesWithAGap(ScriptedEngine):
    session_type = _HasEverything


class _RejectsKnownAdds(ScriptedEngine):
    def on_known_add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        self.reject(session, entry, Ended(grpc.StatusCode.ALREADY_EXISTS, "", "known"))


class _RefusesPlainDefaults(ScriptedEngine):
    def is_neutral(self, name: str, value: object) -> bool:
        return False


class _TakesARequestTwice(ScriptedEngine):
    def check_request_id(self, session: Session, entry: add_pb2.AddEntry) -> None:
        pass


class _NeedsNoParams(ScriptedEngine):
    def check_params(self, entry: add_pb2.AddEntry) -> None:
        if entry.WhichOneof("params") is None:
            entry.sampling.max_tokens = 1


class _IgnoresFields(ScriptedEngine):
    def check_fields(self, entry: add_pb2.AddEntry) -> None:
        self.check_params(entry)


class _ChecksNoValues(ScriptedEngine):
    def check_values(self, entry: add_pb2.AddEntry) -> None:
        pass


class _IgnoresTakenHandles(ScriptedEngine):
    def check_handle(self, session: Session, entry: add_pb2.AddEntry) -> None:
        pass


class _HasNoLimit(ScriptedEngine):
    def check_limit(self, session: Session) -> None:
        pass


class _SendsOutputBack(ScriptedEngine):
    def add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        super().add(session, entry)
        if entry.handle in session.running:
            session.running[entry.handle].num_tokens = 0


class _DrawsInSequence(ScriptedEngine):
    def token(self, running: Running) -> int:
        return (super().token(running) + self.step_number) % EOS_TOKEN_ID


class _HasNoDeadline(ScriptedEngine):
    def add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        super().add(session, entry)
        if entry.handle in session.running:
            session.running[entry.handle].deadline_at = None


class _AbortsAnyAttempt(ScriptedEngine):
    def abort(self, session: Session, abort: engine_pb2.Abort) -> None:
        super().abort(session, engine_pb2.Abort(handles=abort.handles))


class _AbortsInAllSessions(ScriptedEngine):
    def abort(self, session: Session, abort: engine_pb2.Abort) -> None:
        for each in self.sessions:
            super().abort(each, abort)


class _AnswersNoLateAbort(ScriptedEngine):
    def abort(self, session: Session, abort: engine_pb2.Abort) -> None:
        running = [handle for handle in abort.handles if handle in session.running]
        super().abort(session, engine_pb2.Abort(handles=running))


class _EndsTwice(ScriptedEngine):
    def step(self, session: Session) -> step_pb2.Step:
        step = super().step(session)
        step.finished.extend(list(step.finished))
        return step


class _LeavesFirstOut(ScriptedEngine):
    def step(self, session: Session) -> step_pb2.Step:
        step = super().step(session)
        step.ClearField("first")
        return step


class _SendsRaggedColumns(ScriptedEngine):
    def step(self, session: Session) -> step_pb2.Step:
        step = super().step(session)
        step.token_ids += pack([1])
        return step


class _NamesStopsAsLength(ScriptedEngine):
    def step(self, session: Session) -> step_pb2.Step:
        step = super().step(session)
        for finished in step.finished:
            finished.ClearField("stop")
            finished.reason = output_pb2.FINISH_REASON_LENGTH
        return step


class _BeatsSlowly(ScriptedEngine):
    heartbeat_s = 1.7


class _FailsAtGoodbye(ScriptedEngine):
    def on_goodbye(self, session: Session) -> None:
        session.end(Ended(grpc.StatusCode.ABORTED, "", "goodbye"))


class _KeepsItsEpoch(ScriptedEngine):
    def another_epoch(self) -> int:
        return self.epoch


class _ContinuesNothing(ScriptedEngine):
    def check_fields(self, entry: add_pb2.AddEntry) -> None:
        super().check_fields(entry)
        if entry.output_token_ids:
            raise Ended(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED_FIELD", "output_token_ids")


class _HoldsAddsWhileLoading(ScriptedEngine):
    def check_state(self) -> None:
        pass


class _ForgetsSessionsWhileLoading(ScriptedEngine):
    def resumed_by(self, hello: session_pb2.Hello) -> Session | session_pb2.ResumeRefusal:
        return session_pb2.RESUME_REFUSAL_NO_SESSION if self.is_loading else super().resumed_by(hello)


class _TakesSegmentsInAnySession(ScriptedEngine):
    def check_resumable(self, session: Session, entry: add_pb2.AddEntry) -> None:
        pass


class _ForgetsTurns(ScriptedEngine):
    def context_of(self, running: Running) -> tuple[int, ...]:
        return ()


class _KeepsTheLastToken(ScriptedEngine):
    def context_of(self, running: Running) -> tuple[int, ...]:
        return tuple(running.tokens)


class _EndsWithTheFirstTurn(ScriptedEngine):
    def add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        super().add(session, entry)
        for running in session.running.values():
            running.is_open = False


class _TakesSegmentsAgain(ScriptedEngine):
    def is_known_segment(self, running: Running, entry: add_pb2.AddEntry) -> bool:
        return False


class _NeverEndsInput(ScriptedEngine):
    def end_input(self, running: Running) -> None:
        pass


class _CancelsAnyTurn(ScriptedEngine):
    def is_present_turn(self, running: Running, cancel: engine_pb2.CancelTurn) -> bool:
        return True


class _CancelsNoTurn(ScriptedEngine):
    def cancel_turn(self, session: Session, cancel: engine_pb2.CancelTurn) -> None:
        pass


class _ChecksNoSegments(ScriptedEngine):
    def check_segment(self, running: Running, entry: add_pb2.AddEntry) -> None:
        pass


WRONG_ENGINES: tuple[tuple[str, type[ScriptedEngine]], ...] = (
    ("unknown_member", _EndsAtUnknownMessages),
    ("unknown_field", _RejectsUnknownFields),
    ("oversized_message", _TakesAnySize),
    ("two_frontends", _AbortsInAllSessions),
    ("second_hello", _TakesASecondHello),
    ("bad_ids", _TakesAnyId),
    ("common_features", _RepeatsAllFeatures),
    ("typed_features", _ReadsNamesAlone),
    ("newer_epoch", _KeepsOlderSessions),
    ("foreign_session_id", _EndsAllFrontends),
    ("gapless_numbers", _NumbersWithGaps),
    ("loading", _HoldsAddsWhileLoading),
    ("loading", _ForgetsSessionsWhileLoading),
    ("unacknowledged_messages", _KeepsNothing),
    ("full_replay_window", _StepsWithAFullWindow),
    ("resume_after_cut", _SendsOtherBytesAgain),
    ("never_sent", _GivesNoReason),
    ("other_engine_epoch", _ResumesForAnyEpoch),
    ("unknown_session", _ResumesForAnyFrontend),
    ("acknowledged_further", _ResumesWithAGap),
    ("add_sent_again", _RejectsKnownAdds),
    ("neither_params", _NeedsNoParams),
    ("invalid_values", _ChecksNoValues),
    ("fields_of_the_frontend", _IgnoresFields),
    ("plain_defaults", _RefusesPlainDefaults),
    ("request_in_flight", _TakesARequestTwice),
    ("handle_in_flight", _IgnoresTakenHandles),
    ("too_many_requests", _HasNoLimit),
    ("continued_request", _SendsOutputBack),
    ("deadline", _HasNoDeadline),
    ("abort_of_other_attempt", _AbortsAnyAttempt),
    ("abort_after_end", _AnswersNoLateAbort),
    ("resumable_without_feature", _TakesSegmentsInAnySession),
    ("turns", _ForgetsTurns),
    ("turns", _KeepsTheLastToken),
    ("turns", _EndsWithTheFirstTurn),
    ("end_of_input", _TakesSegmentsAgain),
    ("end_of_input", _NeverEndsInput),
    ("cancelled_turn", _CancelsAnyTurn),
    ("cancelled_turn", _CancelsNoTurn),
    ("refused_segments", _ChecksNoSegments),
    ("whole_request", _EndsTwice),
    ("whole_request", _LeavesFirstOut),
    ("continued_sampling", _DrawsInSequence),
    ("rows_of_steps", _SendsRaggedColumns),
    ("stop_token", _NamesStopsAsLength),
    ("heartbeats", _BeatsSlowly),
    ("goodbye", _FailsAtGoodbye),
    ("death", _KeepsItsEpoch),
    ("death", _ContinuesNothing),
)

# Their cases wait for seconds.
SLOW_WRONG_ENGINES: tuple[tuple[str, type[ScriptedEngine]], ...] = (
    ("unacknowledged_session", _KeepsSlowReaders),
    ("unread_messages", _QueuesWithoutLimit),
)
