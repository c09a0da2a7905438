"""One pooling request in flight: waits for its result as others wait for tokens. Knows no engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from frontend_svc.engines.loss import Loss
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.logprobs import LogprobColumns
from service_kit.errors import Aborted, Internal, ServiceError
from triptych.common.v1 import tensor_pb2


@dataclass(frozen=True, slots=True)
class Pooled:
    """What became of one prompt."""

    tensor: tensor_pb2.Tensor
    num_cached_tokens: int


class PoolingState:
    """Takes what steps say of a pooling request. Made in the event loop; its one reader awaits `result`."""

    __slots__ = ("_num_cached", "_result", "_tensor")

    # It yields no tokens, so it neither begins nor counts among prompts that do.
    has_begun = wants_logprobs = False
    num_prompt_tokens = 0

    def __init__(self) -> None:
        self._result: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self._tensor: tensor_pb2.Tensor | None = None
        self._num_cached = 0

    async def result(self) -> Pooled:
        """The result, once it is here. Raises what ended the request instead."""
        return await self._result

    def tell_pooled(self, tensor: tensor_pb2.Tensor) -> None:
        """Take the result, which counts when the request has ended."""
        self._tensor = tensor

    def note_cached(self, num_cached_tokens: int) -> None:
        """Remember how much of the prompt came from the prefix cache."""
        self._num_cached = num_cached_tokens

    def tell_prompt(self, first_position: int, columns: LogprobColumns) -> None:
        """Pass over log probabilities: nobody asked for any."""

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        """Take the end; returns it."""
        if ending is None or self._result.done():
            return ending
        if ending.reason is EndReason.ABORT:
            self._result.set_exception(Aborted("the request was ended before its result was there"))
        elif self._tensor is None or ending.reason is EndReason.ERROR:
            self._result.set_exception(Internal("the engine ended the request without a result"))
        else:
            self._result.set_result(Pooled(self._tensor, self._num_cached))
        return ending

    def lose(self, loss: Loss) -> None:
        """End, as its engine is lost."""
        self.fail(loss.error())

    def fail(self, error: ServiceError) -> None:
        """End with `error`."""
        if not self._result.done():
            self._result.set_exception(error)
