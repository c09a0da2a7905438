"""Where the outputs of each request go, and what is kept of those that may go elsewhere one day.

Belongs to the engine thread. Knows no scheduler and no wire.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_svc.kept_requests import KeptRequests
from engine_svc.mailbox import Add, Adopt, Outbox
from engine_svc.request import FinishReason, RequestOutput
from engine_svc.step import StepPlan, StepResult
from engine_svc.step_output import FinishedRow, StepOutput
from engine_svc.told import Teller, Told


class Routes:
    """The outbox and the handle of every request that has not ended, by its id; others read `by_id` alone."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Outbox, int]] = {}
        self._teller = Teller()
        self._kept = KeptRequests()
        self._kept_ids: dict[tuple[Outbox, int], str] = {}  # of those that are kept and have not ended

    def begin(self, command: Add) -> None:
        """A request comes in."""
        request_id, route = command.request.request_id, (command.outbox, command.handle)
        self.by_id[request_id] = route
        if command.is_kept:
            self._kept.keep(command.request)
            self._kept_ids[route] = request_id

    def forget(self, request_id: str) -> None:
        """Nobody adopts it any more."""
        self._kept.forget(request_id)
        route = self.by_id.get(request_id)
        if route is not None:
            self._kept_ids.pop(route, None)

    def adopt(self, command: Adopt, step_number: int) -> dict[Outbox, StepOutput]:
        """Send the outputs of a request elsewhere from now on: all it has yielded so far, for a start.

        Who had it is told of its end. What is not kept any more ends as aborted for who adopts it.
        """
        request_id, handle = command.request_id, command.handle
        old, found = self.by_id.get(request_id), {}
        if old is not None:
            self._kept_ids.pop(old, None)
            found[old[0]] = _ended(old[1], step_number)
        if request_id not in self._kept:
            found[command.outbox] = _ended(handle, step_number)
            return found
        if old is not None:
            route = self.by_id[request_id] = (command.outbox, handle)
            self._kept_ids[route] = request_id
        found[command.outbox] = self._kept.row(request_id, handle, step_number)
        return found

    def told(self, plan: StepPlan, result: StepResult) -> dict[Outbox, Told]:
        """What a result tells of tokens besides their ids, by who is to hear it."""
        return self._teller.tell(plan, result, self.by_id)

    def rows(
        self, outputs: list[RequestOutput], told: Mapping[Outbox, Told], step_number: int
    ) -> dict[Outbox, StepOutput]:
        """What each outbox gets of these outputs, as one step."""
        steps: dict[Outbox, StepOutput] = {}
        routes, latest, ended = self.by_id, None, []
        self._kept.note(outputs)
        for output in outputs:
            outbox, handle = routes[output.request_id]
            # Neighbours mostly have the same outbox, so its columns are looked up once for all of them.
            if outbox is not latest:
                step = steps.setdefault(outbox, StepOutput(step_number))
                handles, num_tokens, token_ids = step.handles, step.num_tokens, step.token_ids
                latest = outbox
            handles.append(handle)
            num_tokens.append(len(output.new_token_ids))
            token_ids += output.new_token_ids
            if output.num_cached_tokens is not None:
                step.first.append((len(handles) - 1, output.num_cached_tokens))
            if output.finish_reason is not None and not output.continues:
                end = FinishedRow(
                    len(handles) - 1, output.finish_reason, output.stop_token_id, output.message
                )
                step.finished.append(end)
                ended.append(routes.pop(output.request_id))
                self._teller.forget(output.request_id)
        for outbox, part in told.items():
            step = steps.setdefault(outbox, StepOutput(step_number))
            step.tell(part)
            if self._kept_ids and step.told is not None:
                self._note_told(outbox, step.told)
        if self._kept_ids:
            for route in ended:
                self._kept_ids.pop(route, None)
        return steps

    def _note_told(self, outbox: Outbox, told: Told) -> None:
        for handle in {*told.sampled, *told.prompts}:
            request_id = self._kept_ids.get((outbox, handle))
            if request_id is not None:
                self._kept.note_told(request_id, told, handle)


def _ended(handle: int, step_number: int) -> StepOutput:
    return StepOutput(step_number, [handle], [0], finished=[FinishedRow(0, FinishReason.ABORT)])
