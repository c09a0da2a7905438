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
        self.cancelled_at: dict[int, int] = {}  # tokens that a turn had when it was cancelled, by its place
        self._has_output = False  # of the present turn

    @property
    def num_tokens(self) -> int:
        """Tokens that came out of it, those of an earlier engine included."""
        return sum(map(len, self.answers))

    def cancel(self) -> None:
        """The present turn is to end with its next token."""
        self.cancelled_at.setdefault(len(self.endings), len(self.answers[-1]))

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
            if reason in _CUT_SHORT and len(self.endings) - 1 not in self.cancelled_at:
                raise BrokenInvariant("order", f"{request_id}: a turn ends by {reason}, and it goes on")
            self._has_output = False
            self.answers.append([])
            return
        self.has_ended = True

    def check(self, max_model_len: int) -> None:
        """Compare every answer with what it would have been alone; one cut short with its beginning."""
        reasons = [reason for reason, _ in self.endings]
        cuts = {index: len(self.answers[index]) for index, why in enumerate(reasons) if why in _CUT_SHORT}
        for index, alone in enumerate(answers_alone(self.identity, self.turns, max_model_len, cuts)):
            if index == len(self.endings):
                return
            answer, (reason, stop_token_id) = self.answers[index], self.endings[index]
            most = self.cancelled_at.get(index, len(alone.token_ids)) + 1
            if index in cuts:
                # Of the ends by a token, that by repetition alone comes after a cancel.
                is_over = len(answer) >= len(alone.token_ids) and alone.reason is not FinishReason.REPETITION
                if answer != alone.token_ids[: len(answer)] or is_over or len(answer) > most:
                    raise BrokenInvariant("isolation", self._describe(index, answer, alone.token_ids))
            elif (answer, reason, stop_token_id) != (alone.token_ids, alone.reason, alone.stop_token_id):
                raise BrokenInvariant(
                    "isolation", f"{self._describe(index, answer, alone.token_ids)}; {reason}, {alone.reason}"
                )
            elif len(answer) > most:
                raise BrokenInvariant("order", f"turn {index} of {self.request.request_id} was cancelled")

    def _describe(self, index: int, answer: list[int], alone: list[int]) -> str:
        return f"{self.request.request_id} answers turn {index} with {answer}, alone with {alone}"
