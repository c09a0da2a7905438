"""Frontends that break one rule each, with the name of the case that is to notice it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract.scripted_frontend import EngineLink, Request, ScriptedFrontend, Void
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, session_pb2, step_pb2


class _EndsAtUnknownMessages(EngineLink):
    def on_unknown(self) -> None:
        raise Void


class _UsesLoadingEngines(EngineLink):
    def on_hello_ack(self, ack: session_pb2.HelloAck) -> None:
        self.is_ready = True


class _UsesAnyRevision(EngineLink):
    def is_compatible(self, ack: session_pb2.HelloAck) -> bool:
        return True


class _RetriesAtOnce(EngineLink):
    incompatible_retry_s = 0.1


class _AcknowledgesNothing(EngineLink):
    def acknowledge(self) -> None:
        pass


class _AcknowledgesTooMuch(EngineLink):
    def acknowledge(self) -> None:
        self.last_seq += 1
        super().acknowledge()
        self.last_seq -= 1


class _OverlooksGaps(EngineLink):
    def check_number(self, seq: int) -> None:
        pass


class _ResumesNothing(EngineLink):
    def can_resume(self) -> bool:
        return False


class _ResumesTooEarly(EngineLink):
    def resume_at(self) -> int:
        return 0


class _SendsNoAddAgain(EngineLink):
    def send_add_again(self, handle: int, request: Request) -> None:
        pass


class _SendsAllAgainInOne(EngineLink):
    def send_again(self) -> None:
        waiting = [(handle, request) for handle, request in self.requests.items() if not request.has_begun]
        entries = [request.entry(handle, others_may_adopt=False) for handle, request in waiting]
        self.send(add=add_pb2.Add(entries=entries))


class _SendsNoAbortAgain(EngineLink):
    def send_abort_again(self, handle: int) -> None:
        pass


class _OverlooksColumns(EngineLink):
    def check_columns(self, handles: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        pass


class _IgnoresDraining(EngineLink):
    def on_draining(self) -> None:
        pass


class _IgnoresHangs(EngineLink):
    def on_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> None:
        pass


class _UsesAdoptionAnyway(EngineLink):
    def others_may_adopt(self) -> bool:
        return True


class _JudgesByAgeAlone(EngineLink):
    def budget_ms(self, heartbeat: session_pb2.Heartbeat) -> int:
        return 5000


class _AbortsNothingThatMoved(EngineLink):
    def abort_moved(self, handles: Sequence[int]) -> None:
        pass


class _ConnectsOnce(EngineLink):
    def on_hello_ack(self, ack: session_pb2.HelloAck) -> None:
        super().on_hello_ack(ack)
        self.is_closing = True


class _MovesCancelledRequests(EngineLink):
    def is_moved(self, request: Request) -> bool:
        return True


class _ForgetsWhatDrains(EngineLink):
    def on_draining(self) -> None:
        super().on_draining()
        self.requests.clear()


class _ResumesForever(EngineLink):
    resume_limit_s = None

    async def check_broken(self, call: Any) -> None:
        pass


class _InlinesEverything(EngineLink):
    def is_uploaded(self, tensor: tensor_pb2.Tensor) -> bool:
        return False


class _UploadsEverything(EngineLink):
    def is_uploaded(self, tensor: tensor_pb2.Tensor) -> bool:
        return True


class _UploadsOnce(EngineLink):
    has_uploaded = False

    async def upload(self, content: bytes) -> None:
        if not _UploadsOnce.has_uploaded:
            _UploadsOnce.has_uploaded = True
            await super().upload(content)


class _SaysNoGoodbye(EngineLink):
    def close(self) -> None:
        pass


class _CountsRequests(ScriptedFrontend):
    num_requests = 0

    def requests_of(self, request: generate_pb2.GenerateRequest, remaining_ms: int | None) -> list[Request]:
        requests = super().requests_of(request, remaining_ms)
        for one in requests:
            self.num_requests += 1
            one.request_id = f"request {self.num_requests}"
        return requests


class _ContinuesAtAnyModel(ScriptedFrontend):
    def can_continue(self, request: Request, link: EngineLink) -> bool:
        return True


class _ForgetsOutput(ScriptedFrontend):
    def move(self, request: Request, link: EngineLink | None) -> None:
        request.output.clear()
        super().move(request, link)


class _DrawsAnotherSeed(ScriptedFrontend):
    def move(self, request: Request, link: EngineLink | None) -> None:
        request.seed += 1
        super().move(request, link)


class _CountsNoAttempts(ScriptedFrontend):
    def move(self, request: Request, link: EngineLink | None) -> None:
        request.attempt -= 1
        super().move(request, link)


class _PassesEverythingOn(ScriptedFrontend):
    def requests_of(self, request: generate_pb2.GenerateRequest, remaining_ms: int | None) -> list[Request]:
        (first, *_) = super().requests_of(request, remaining_ms)
        first.sampling.CopyFrom(request.sampling)
        return [first]


class _KeepsDeadlines(ScriptedFrontend):
    def requests_of(self, request: generate_pb2.GenerateRequest, remaining_ms: int | None) -> list[Request]:
        return super().requests_of(request, None)


class _AbortsNothing(ScriptedFrontend):
    def on_client_gone(self, request: Request) -> None:
        pass


class _SendsResumableAnywhere(EngineLink):
    def takes_segments(self) -> bool:
        return True


class _LeavesTheLastTokenOut(EngineLink):
    def num_kept_of(self, before: Request) -> int:
        return super().num_kept_of(before) + 1


class _CountsNoSegments(EngineLink):
    def segment_after(self, before: Request) -> int:
        return 1


class _AbortsTurns(EngineLink):
    def cancel_turn(self, request: Request) -> bool:
        return False


class _OverlooksEndsBetweenTurns(EngineLink):
    def on_idle_end(self, handle: int) -> None:
        pass

    def on_gone(self, request: Request, finished: step_pb2.StepFinished) -> None:
        request.events.put_nowait(finished.reason)


class _LeavesRequestsOpen(ScriptedFrontend):
    def end_session(self, session: object) -> None:
        pass


def _with(link: type[EngineLink]) -> type[ScriptedFrontend]:
    return type(link.__name__, (ScriptedFrontend,), {"link_type": link})


WRONG_FRONTENDS: tuple[tuple[str, type[ScriptedFrontend]], ...] = (
    ("unknown_member", _with(_EndsAtUnknownMessages)),
    ("small_frames", _with(_SendsAllAgainInOne)),
    ("loading_engine", _with(_UsesLoadingEngines)),
    ("incompatible_engine", _with(_UsesAnyRevision)),
    ("incompatible_engine_again", _with(_RetriesAtOnce)),
    ("acknowledgements", _with(_AcknowledgesNothing)),
    ("acknowledgements", _with(_AcknowledgesTooMuch)),
    ("gap", _with(_OverlooksGaps)),
    ("resume_after_cut", _with(_ResumesNothing)),
    ("resume_after_cut", _with(_ResumesTooEarly)),
    ("add_sent_again", _with(_SendsNoAddAgain)),
    ("abort_sent_again", _with(_SendsNoAbortAgain)),
    ("columns_that_do_not_fit", _with(_OverlooksColumns)),
    ("draining_engine", _with(_IgnoresDraining)),
    ("hung_engine", _with(_IgnoresHangs)),
    ("features_not_named", _with(_UsesAdoptionAnyway)),
    ("request_to_adopt", _CountsRequests),
    ("moved_request", _with(_AbortsNothingThatMoved)),
    ("slow_step", _with(_JudgesByAgeAlone)),
    ("session_without_feature", _with(_SendsResumableAnywhere)),
    ("next_segment", _with(_LeavesTheLastTokenOut)),
    ("next_segment", _with(_CountsNoSegments)),
    ("end_of_session", _LeavesRequestsOpen),
    ("cancelled_turn", _with(_AbortsTurns)),
    ("request_ended_between_turns", _with(_OverlooksEndsBetweenTurns)),
    ("other_fingerprint", _ContinuesAtAnyModel),
    ("death_before_ready", _with(_UsesLoadingEngines)),
    ("death_before_ready", _with(_ConnectsOnce)),
    ("death_with_requests", _with(_MovesCancelledRequests)),
    ("death_while_draining", _with(_ForgetsWhatDrains)),
    ("death_while_resuming", _with(_ResumesForever)),
    ("small_tensor", _with(_UploadsEverything)),
    ("large_tensor", _with(_InlinesEverything)),
    ("lost_blob", _with(_UploadsOnce)),
    ("goodbye", _with(_SaysNoGoodbye)),
    ("resume_refused", _ForgetsOutput),
    ("other_epoch", _DrawsAnotherSeed),
    ("engine_that_leaves", _CountsNoAttempts),
    ("sampling_group", _PassesEverythingOn),
    ("deadline", _KeepsDeadlines),
    ("cancelled_client", _AbortsNothing),
)
