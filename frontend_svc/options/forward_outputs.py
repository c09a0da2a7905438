"""What a forward pass computes at a request's positions, which comes with the end of an output."""

from __future__ import annotations

from frontend_svc.engines.connection.position_reader import PositionReader
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.request_state import OutputReader
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2


class ForwardOutput(RequestOption):
    """An engine that does not serve it refuses it by name. Chats have no such field.

    name: the field of the result; what asks for it is the same in a request and in an ADD.
    """

    def __init__(self, name: str) -> None:
        self._name, self._asks = name, f"return_{name}"
        self.fields = (self._asks,)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if self._is_asked(request):
            setattr(entry, self._asks, True)

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        return PositionReader(self._name, len(prompt.token_ids)) if self._is_asked(request) else None

    def _is_asked(self, request: AnyRequest) -> bool:
        return isinstance(request, generate_pb2.GenerateRequest) and bool(getattr(request, self._asks))


FORWARD_OUTPUTS = (ForwardOutput("hidden_states"), ForwardOutput("routed_experts"))
