"""Hidden states of a request's positions, which come with the end of an output."""

from __future__ import annotations

from frontend_svc.engines.connection.position_reader import PositionReader
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.request_state import OutputReader
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2


class HiddenStates(RequestOption):
    """An engine that does not serve them refuses them by name. Chats have no such field."""

    fields = ("return_hidden_states",)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if isinstance(request, generate_pb2.GenerateRequest) and request.return_hidden_states:
            entry.return_hidden_states = True

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        if isinstance(request, generate_pb2.GenerateRequest) and request.return_hidden_states:
            return PositionReader("hidden_states", len(prompt.token_ids))
        return None
