"""Digests of what a rank keeps of its requests, to compare ranks that must be in the same state.

Keys and values of KV caches are left out: each rank has those of its own heads or layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from engine_svc.ranks.plan_codec import PlanDecoder
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.sampler import Sampler


def batch_digest(decoder: PlanDecoder, batch: InputBatch, num_groups: int) -> str:
    """Digest over each request's handle, row, known tokens and blocks."""
    digest = hashlib.sha256()
    for request_id, (handle, num_computed) in sorted(decoder.rows().items()):
        row = batch.row_of[request_id]
        # The token after those with KV has been sampled, or is the prompt's next.
        token_ids = batch.token_ids[row, : num_computed + 1].tolist()
        tables = [batch.table(group, row) for group in range(num_groups)]
        digest.update(repr((request_id, handle, row, num_computed, token_ids, tables)).encode())
    return digest.hexdigest()


def sampler_digest(sampler: Sampler) -> str:
    """Digest over all numbers that the sampler and its parts keep of rows."""
    digest = hashlib.sha256()
    for data in _walk(sampler):
        digest.update(data)
    return digest.hexdigest()


def _walk(value: object) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Tensor):
        yield value.cpu().numpy().tobytes()
    elif isinstance(value, bool | int | float | str | bytes | None):
        yield repr(value).encode()
    elif isinstance(value, set | frozenset):
        yield repr(sorted(value)).encode()
    elif isinstance(value, dict):
        for key, kept in value.items():
            yield repr(key).encode()
            yield from _walk(kept)
    elif isinstance(value, list | tuple):
        for kept in value:
            yield from _walk(kept)
    elif hasattr(value, "__dict__") and not callable(value):
        # Features share the batch's token ids: those of free rows are whatever was there before.
        yield from _walk({name: kept for name, kept in vars(value).items() if name != "_token_ids"})
