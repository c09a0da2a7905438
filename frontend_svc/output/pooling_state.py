"""The state of a pooling request in flight, the counterpart of `RequestState`. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.engine_times import Progress
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.loss import Loss, LossKind
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import Aborted, Internal, ServiceError, Unavailable


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result for one prompt."""

    tensor: tensor_pb2.Tensor
    num_cached_tokens: int


class PoolingState:
    """Receives the outputs of a pooling request. Created on the event loop; one reader awaits `result`.

    on_lost: called if its engine is lost, or refuses it and another may not: the request can be sent again.
    """

    __slots__ = ("_num_cached", "_parts", "_result", "on_lost")

    wants_logprobs = False
    has_stop_strings = False

    def __init__(self) -> None:
        self._result: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self._parts: list[tensor_pb2.Tensor] = []
        self._num_cached = 0
        self.on_lost: Callable[[LossKind, ServiceError], None] | None = None

    async def result(self) -> Pooled:
        """Wait for the result. Raises the error that ended the request."""
        return await self._result

    def add_extra(self, extra: step_pb2.StepExtra) -> None:
        """Store the result, or its next part, which is delivered when the request has ended."""
        if extra.HasField("pooling_output"):
            self._parts.append(extra.pooling_output)

    def note_cached(self, num_cached_tokens: int) -> None:
        self._num_cached = num_cached_tokens

    def note_progress(self, progress: Progress) -> None:
        """The answer has no times."""

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        if ending is None or self._result.done():
            return ending
        if ending.reason is EndReason.ABORT:
            self._result.set_exception(Aborted("the request was aborted before its result was computed"))
        elif not self._parts or ending.reason is EndReason.ERROR:
            self._result.set_exception(Internal("the engine ended the request without a result"))
        else:
            self._result.set_result(Pooled(_joined(self._parts), self._num_cached))
        return ending

    def lose(self, loss: Loss) -> None:
        """The engine is lost: retry elsewhere, or end with the loss's error."""
        # Another engine makes the whole result.
        self._parts.clear()
        if self.on_lost is None:
            self.end_with(loss.error())
        else:
            self.on_lost(loss.kind, loss.error())

    def fail(self, error: ServiceError) -> None:
        """End with `error`, or retry elsewhere if that may help."""
        if self.on_lost is not None and isinstance(error, Unavailable):
            self.on_lost(LossKind.REFUSED, error)
        else:
            self.end_with(error)

    def end_with(self, error: ServiceError) -> None:
        """End with `error`, without a retry."""
        if not self._result.done():
            self._result.set_exception(error)


def _joined(parts: Sequence[tensor_pb2.Tensor]) -> tensor_pb2.Tensor:
    """The tensor whose first dimension was sent in parts."""
    if len(parts) == 1:
        return parts[0]
    return tensor_pb2.Tensor(
        dtype=parts[0].dtype,
        shape=[sum(part.shape[0] for part in parts), *parts[0].shape[1:]],
        inline=b"".join(part.inline for part in parts),
    )
