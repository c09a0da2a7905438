"""What a forward pass computes at a request's positions, which comes with the end of an output."""

from __future__ import annotations

from frontend_svc.engines.connection.position_reader import PositionReader
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.request_state import OutputReader
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2


class ForwardOutput(RequestOption):
    """An engine that does not serve it refuses it by name. Chats have no such field.

    asks: the field that asks for it, the same in a request and in an ADD. gives: the field of the result.
    """

    def __init__(self, asks: str, gives: str) -> None:
        self._asks, self._gives = asks, gives
        self.fields = (asks,)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if self._is_asked(request):
            setattr(entry, self._asks, True)
            prompt.is_computed_whole = True

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        return PositionReader(self._gives, len(prompt.token_ids)) if self._is_asked(request) else None

    def _is_asked(self, request: AnyRequest) -> bool:
        return isinstance(request, generate_pb2.GenerateRequest) and bool(getattr(request, self._asks))


FORWARD_OUTPUTS = (
    ForwardOutput(asks="return_hidden_states", gives="hidden_states"),
    ForwardOutput(asks="return_routed_experts", gives="routed_experts"),
)
