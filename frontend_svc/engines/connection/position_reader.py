"""Reads a tensor over the positions of a request from the steps that compute them."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from frontend_svc.engines.connection.columns import MalformedStep
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import step_pb2


class PositionReader:
    """Reads one tensor over the positions of a request, which comes in parts, and again from another engine.

    extra: the field of StepExtra, and of the message that the client gets.
    """

    is_awaited = False

    def __init__(self, extra: str, num_prompt_tokens: int) -> None:
        self.extra = extra
        self._num_prompt_tokens = num_prompt_tokens
        self._first = 0
        self._num_read = 0
        self._dtype = tensor_pb2.D_TYPE_UNSPECIFIED
        self._row_shape: tuple[int, ...] = ()
        self._content = bytearray()

    def read(self, extra: step_pb2.StepExtra) -> None:
        """Add the positions of one step that are new. Raises MalformedStep."""
        tensor: tensor_pb2.Tensor = getattr(extra, self.extra)
        num_rows, row_shape = (tensor.shape[0] if tensor.shape else 0), tuple(tensor.shape[1:])
        if not num_rows or len(tensor.inline) % num_rows:
            raise MalformedStep(f"{self.extra} has {len(tensor.inline)} bytes of {num_rows} positions")
        end = self._first + self._num_read
        if extra.first_position > end or not self._num_read:
            # Of the positions before, a frontend that was lost has read the only copy.
            self._first, self._num_read = extra.first_position, 0
            self._dtype, self._row_shape = tensor.dtype, row_shape
            self._content.clear()
            end = self._first
        if (tensor.dtype, row_shape) != (self._dtype, self._row_shape):
            raise MalformedStep(f"{self.extra} has shape {row_shape}, was {self._row_shape}")
        num_known = end - extra.first_position
        if num_known < num_rows:
            self._content += tensor.inline[num_known * (len(tensor.inline) // num_rows) :]
            self._num_read += num_rows - num_known

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None:
        """Set the tensor of the message that ends an output."""
        if not isinstance(message, generate_pb2.Finished | generate_pb2.Output) or not self._num_read:
            return
        # The last token was not read by the model, unless the engine went on behind a stop string.
        num_computed = self._num_prompt_tokens + max(0, len(output_token_ids) - 1)
        num_rows = max(0, min(self._num_read, num_computed - self._first))
        row_bytes = len(self._content) // self._num_read
        outputs = message.forward_outputs
        outputs.first_position = self._first
        tensor: tensor_pb2.Tensor = getattr(outputs, self.extra)
        tensor.dtype = self._dtype
        tensor.shape[:] = (num_rows, *self._row_shape)
        tensor.inline = bytes(self._content[: num_rows * row_bytes])
