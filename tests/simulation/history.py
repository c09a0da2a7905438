"""What a request was asked and has answered so far, and whether that is what it would have answered alone."""

from __future__ import annotations

from engine_svc.core.request import FinishReason, Request, RequestOutput
from tests.simulation.alone import Turn, answers_alone
from tests.simulation.broken import BrokenInvariant
from tests.simulation.digest_model import Identity, identity_of

_CUT_SHORT = (FinishReason.ABORT, FinishReason.ERROR)


class History:
    """The stream of one request. A turn of it has one last output, and so has the whole."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.identity: Identity = identity_of(request)
        self.turns = [Turn(request.token_ids[: request.num_prompt_tokens], request.sampling)]
        self.answers = [request.output_token_ids]
        self.endings: list[tuple[FinishReason, int | None]] = []
        self.has_ended = False
        self._has_output = False  # of the present turn

    @property
    def num_tokens(self) -> int:
        """Tokens that came out of it, those of an earlier engine included."""
        return sum(map(len, self.answers))

    def take(self, output: RequestOutput) -> None:
        request_id, reason = output.request_id, output.finish_reason
        if self.has_ended:
            raise BrokenInvariant("terminal-once", f"{request_id} has an output behind its last")
        # An end between two turns is of none.
        is_first = not self._has_output and len(self.endings) < len(self.turns)
        if (output.num_cached_tokens is not None) is not is_first:
            raise BrokenInvariant("order", f"{request_id}: only the first of a turn reports cached tokens")
        self._has_output = True
        self.answers[-1] += output.new_token_ids
        if reason is None:
            if not output.new_token_ids or output.continues:
                raise BrokenInvariant("order", f"{request_id} has an output that says nothing")
            return
        self.endings.append((reason, output.stop_token_id))
        if output.continues:
            self._has_output = False
            self.answers.append([])
            return
        self.has_ended = True

    def check(self, max_model_len: int) -> None:
        """Compare every answer with what it would have been alone; one cut short with its beginning."""
        for index, alone in enumerate(answers_alone(self.identity, self.turns, max_model_len)):
            if index == len(self.endings):
                return
            answer, (reason, stop_token_id) = self.answers[index], self.endings[index]
            if reason in _CUT_SHORT and index == len(self.endings) - 1:
                if answer != alone.token_ids[: len(answer)] or len(answer) >= len(alone.token_ids):
                    raise BrokenInvariant("isolation", self._describe(index, answer, alone.token_ids))
            elif (answer, reason, stop_token_id) != (alone.token_ids, alone.reason, alone.stop_token_id):
                raise BrokenInvariant(
                    "isolation", f"{self._describe(index, answer, alone.token_ids)}; {reason}, {alone.reason}"
                )

    def _describe(self, index: int, answer: list[int], alone: list[int]) -> str:
        return f"{self.request.request_id} answers turn {index} with {answer}, alone with {alone}"
