"""Reads prompt embeddings of an ADD: token ids, and embeddings at positions without a token."""

from __future__ import annotations

import hashlib
from itertools import compress, count, groupby

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.core.request import ContentSpan
from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from engine_svc.tensors.host_tensor import ITEM_SIZES, MAX_MODERATE
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.field_checks import unserved

# Placeholder at positions with an embedding. The prefix cache distinguishes them by their spans.
_NO_TOKEN = 0
_DTYPES = ("float32", "float16", "bfloat16")


def make(config: EngineConfig) -> WireFeature:
    return PromptEmbedsOfAdd(is_enabled=config.enable_prompt_embeds)


class PromptEmbedsOfAdd(WireFeature):
    """Not enabled, it refuses embeddings by name."""

    fields = ("prompt_embeds", "is_token")

    def __init__(self, *, is_enabled: bool) -> None:
        self.takes_tensors = is_enabled

    def announce(self, ready: session_pb2.Ready) -> None:
        ready.takes_prompt_embeds = self.takes_tensors

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        """Raises also an error of the tensor source."""
        if not entry.HasField("prompt_embeds"):
            num_tokens = len(context.token_ids)
            if entry.is_token and entry.is_token != b"\x01" * num_tokens:
                raise InvalidArgument(
                    f"is_token takes a 1 for each of {num_tokens} positions, as there is no prompt_embeds",
                    field="is_token",
                )
            return None
        if context.tensors is None or not self.takes_tensors:
            raise unserved("prompt_embeds")
        facts, shape = context.facts, tuple(entry.prompt_embeds.shape)
        # The shape is checked before anything is read: a prompt that is far too long must cost no more.
        if len(shape) != 2 or shape[1] != facts.hidden_size or not 0 < shape[0] < facts.max_model_len:
            raise InvalidArgument(
                f"prompt_embeds.shape is {list(shape)[:8]}, it takes [positions, {facts.hidden_size}] with 1 "
                f"to {facts.max_model_len - 1} positions",
                field="prompt_embeds.shape",
            )
        token_ids, positions = _positions_of(entry, shape[0], context.token_ids)
        embeds = context.tensors.take(entry.prompt_embeds, "prompt_embeds")
        if embeds.dtype not in _DTYPES:
            raise InvalidArgument(
                f"prompt_embeds.dtype is {embeds.dtype}, it takes {', '.join(_DTYPES)}",
                field="prompt_embeds.dtype",
            )
        if not embeds.is_sound:
            raise InvalidArgument("prompt_embeds has elements that are not finite", field="prompt_embeds")
        if not embeds.is_moderate:
            # Finite here but infinite in the model's dtype, they would make the logits NaN.
            raise InvalidArgument(
                f"prompt_embeds has elements beyond {MAX_MODERATE:g}", field="prompt_embeds"
            )
        content = PromptEmbeds(embeds, positions)
        return Parsed(content, token_ids, tuple(_spans(content, facts.block_size)))


def _positions_of(
    entry: add_pb2.AddEntry, num_embeds: int, token_ids: list[int]
) -> tuple[list[int], tuple[int, ...]]:
    """The token id of each prompt position, and the positions that have an embedding instead."""
    if not entry.prompt_token_ids:
        if entry.is_token and entry.is_token != bytes(num_embeds):
            raise InvalidArgument("is_token names tokens, there are no prompt_token_ids", field="is_token")
        return [_NO_TOKEN] * num_embeds, tuple(range(num_embeds))
    is_token = entry.is_token
    if len(is_token) != len(token_ids) or max(is_token, default=0) > 1:
        raise InvalidArgument(
            f"is_token takes a 0 or 1 for each of {len(token_ids)} positions, it has {len(is_token)} bytes",
            field="is_token",
        )
    positions = tuple(compress(count(), (not flag for flag in is_token)))
    if len(positions) != num_embeds:
        raise InvalidArgument(
            f"prompt_embeds has {num_embeds} rows, is_token has {len(positions)} positions for them",
            field="is_token",
        )
    for position in positions:
        token_ids[position] = _NO_TOKEN
    return token_ids, positions


def _spans(content: PromptEmbeds, block_size: int) -> list[ContentSpan]:
    """A span for each run of embeddings within a block, so that equal prefixes have equal block hashes."""
    embeds = content.embeds
    row_bytes = embeds.shape[1] * ITEM_SIZES[embeds.dtype]
    spans, first = [], 0
    numbered = enumerate(content.positions)
    # Consecutive positions of one block have the same difference to their index.
    for _, stretch in groupby(numbered, lambda pair: (pair[1] - pair[0], pair[1] // block_size)):
        rows = list(stretch)
        end = first + len(rows)
        digest = hashlib.sha256(embeds.dtype.encode())
        digest.update(memoryview(embeds.data)[first * row_bytes : end * row_bytes])
        spans.append(ContentSpan(rows[0][1], len(rows), f"embeds:{digest.hexdigest()}"))
        first = end
    return spans
