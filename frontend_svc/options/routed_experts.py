"""Experts that routers choose at a request's positions, which come with the end of an output."""

from __future__ import annotations

from frontend_svc.engines.connection.position_reader import PositionReader
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.output.request_state import OutputReader
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2


class RoutedExperts(RequestOption):
    """An engine that does not serve them refuses them by name. Chats have no such field."""

    fields = ("return_routed_experts",)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if isinstance(request, generate_pb2.GenerateRequest) and request.return_routed_experts:
            entry.return_routed_experts = True

    def reader(self, request: AnyRequest, prompt: PreparedPrompt, index: int) -> OutputReader | None:
        if isinstance(request, generate_pb2.GenerateRequest) and request.return_routed_experts:
            return PositionReader("routed_experts", len(prompt.token_ids))
        return None
