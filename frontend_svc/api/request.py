"""RequestService: Abort and GetRequest."""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from frontend_svc.generation.open_requests import OpenRequests, RequestPhase
from frontend_svc.text.limits import Violations
from triptych.api.v1 import request_pb2, request_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_kit.rules import MessageRules
from triptych_kit.security.identity import current_identity

_STATES = {
    RequestPhase.QUEUED: request_pb2.REQUEST_STATE_QUEUED,
    RequestPhase.RUNNING: request_pb2.REQUEST_STATE_RUNNING,
    RequestPhase.FINISHED: request_pb2.REQUEST_STATE_FINISHED,
}

AbortContext: TypeAlias = "grpc.aio.ServicerContext[request_pb2.AbortRequest, request_pb2.AbortResponse]"
GetContext: TypeAlias = (
    "grpc.aio.ServicerContext[request_pb2.GetRequestRequest, request_pb2.GetRequestResponse]"
)

_RULES = {
    message: MessageRules(message) for message in (request_pb2.AbortRequest, request_pb2.GetRequestRequest)
}


class RequestServicer(request_pb2_grpc.RequestServiceServicer):
    """Knows the open requests of this process only; those of another frontend or tenant are NOT_FOUND."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests

    async def Abort(
        self, request: request_pb2.AbortRequest, context: AbortContext
    ) -> request_pb2.AbortResponse:
        """End every request of the id; their streams end with finish reason ABORT and status OK."""
        phase = self._requests.abort(_id_of(request), tenant=current_identity().tenant)
        return request_pb2.AbortResponse(state=_STATES[phase])

    async def GetRequest(
        self, request: request_pb2.GetRequestRequest, context: GetContext
    ) -> request_pb2.GetRequestResponse:
        """The state of a request; of several with the same id, the one that arrived first."""
        facts = self._requests.facts(_id_of(request), tenant=current_identity().tenant)
        return request_pb2.GetRequestResponse(
            request_id=facts.request_id,
            state=_STATES[facts.phase],
            usage=output_pb2.Usage(
                num_prompt_tokens=facts.num_prompt_tokens,
                num_cached_tokens=facts.num_cached_tokens,
                num_completion_tokens=facts.num_sampled_tokens,
            ),
            age_ms=round(facts.age_s * 1000),
            engine_id=facts.engine_id,
            num_attempts=facts.num_attempts,
        )


def _id_of(request: request_pb2.AbortRequest | request_pb2.GetRequestRequest) -> str:
    violations = Violations()
    violations.extend(_RULES[type(request)].violations(request, {}))
    violations.raise_if_any()
    return request.request_id
