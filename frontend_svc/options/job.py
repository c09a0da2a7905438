"""Jobs: agents' runs of many requests, whose blocks engines may keep from one turn to the next."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from triptych.engine.v1 import add_pb2, session_pb2


class Job(RequestOption):
    """The ADD has the job. Its turns go to one engine, which gets a hint of the tool that each has called."""

    fields = ("job_id", "is_last_step")

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if not request.job_id:
            return
        entry.job_id, entry.is_last_step = prompt.scoped(request.job_id), request.is_last_step
        prompt.session_id = request.job_id
        if not request.is_last_step:
            prompt.hint_of = _hint_of


def _hint_of(called: str | None) -> session_pb2.FinishHint:
    return session_pb2.FinishHint(tool_name=called)
