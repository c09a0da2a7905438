"""What a request wants from the hidden states of its prompt, and its result."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_svc.core.extras import Extra, OutputExtra

ITEM_BYTES = 4  # results are fp32
MAX_QUERY_BYTES = 64 << 20  # of all vectors that are kept under keys
# An upper limit of a tensor's message without its content.
_TENSOR_BYTES = 64


@dataclass(frozen=True, slots=True)
class PoolingRequest(Extra):
    """task: as in Ready.supported_tasks.  num_dimensions: None for all.  normalizes: None as the model.

    second_text_start: of a prompt of two texts; None for one text.
    late_key: with the task token_embed the vectors are kept under it, with score compared with those.
    late_scope: what else must be the same for a score to find the vectors.
    activates: of classes and scores, False for logits; None as the model.
    """

    task: str
    num_dimensions: int | None = None
    normalizes: bool | None = None
    second_text_start: int | None = None
    late_key: str = ""
    activates: bool | None = None
    late_scope: str = ""

    @property
    def blocker(self) -> str:
        """A score waits until its query is found."""
        return "late_query" if self.late_key and self.task == "score" else ""

    @property
    def is_per_token(self) -> bool:
        """Whether the result has an entry for each token."""
        return self.task.startswith("token_") or bool(self.late_key)

    def computed(self) -> PoolingRequest:
        """What the model computes for it, vectors of tokens if it has a key; equal ones are made together."""
        if not self.late_key and self.second_text_start is None:
            # Most are, and a copy of each row in each step would cost.
            return self
        task = "token_embed" if self.late_key else self.task
        return replace(self, task=task, second_text_start=None, late_key="", late_scope="")


@dataclass(frozen=True, slots=True)
class PooledResult(OutputExtra):
    """A result, or some of its first dimension: fp32, little-endian, row-major."""

    shape: tuple[int, ...]
    content: bytes

    @property
    def size_bytes(self) -> int:
        return _TENSOR_BYTES + len(self.content)

    def merged(self, later: PooledResult) -> PooledResult:
        shape = (self.shape[0] + later.shape[0], *self.shape[1:])
        return PooledResult(shape, self.content + later.content)

    def split(self, max_bytes: int) -> list[PooledResult]:
        """Parts with whole entries of the first dimension."""
        num_bytes = len(self.content) // max(1, self.shape[0])
        count = max(1, (max_bytes - _TENSOR_BYTES) // max(1, num_bytes))
        return [
            PooledResult(
                (min(count, self.shape[0] - first), *self.shape[1:]),
                self.content[first * num_bytes : (first + count) * num_bytes],
            )
            for first in range(0, self.shape[0], count)
        ]


EXTRAS = (PoolingRequest, PooledResult)
