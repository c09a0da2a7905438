"""The turns of a resumable request: one ends, the request waits with its KV, the next chunk continues it.

Knows no queues and no blocks.
"""

from __future__ import annotations

from engine_svc.core.request import Chunk, Request
from engine_svc.scheduler.stopping import note_limits

INPUT = "input"  # the blocker of a request between two turns: it waits for its next chunk


def settle_turn(request: Request, hash_block_size: int) -> None:
    """Drop what was sampled last: it has no KV that counts, and the next chunk takes its place."""
    num_kept = request.num_tokens - 1
    del request.token_ids[num_kept:]
    del request.block_hashes[num_kept // hash_block_size :]
    # Drafts behind the end may have been computed as well; a preempted request has nothing computed.
    request.num_computed_tokens = min(request.num_computed_tokens - request.num_placeholders, num_kept)
    request.num_placeholders = 0
    request.draft_token_ids = []


def begin_turn(request: Request, chunk: Chunk, max_model_len: int) -> None:
    """Append a chunk. All that is known before its output counts as prompt from now on."""
    request.token_ids += chunk.token_ids
    request.num_prompt_tokens = request.num_tokens
    request.sampling = chunk.sampling
    request.end_token_ids = chunk.sampling.end_token_ids
    note_limits(request, max_model_len)
