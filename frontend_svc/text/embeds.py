"""Prompts with embeddings at some or all positions: checks them and adds them to an ADD.

Never looks into the bytes: the engine checks whether they are finite numbers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import groupby

from frontend_svc.tensors.wire_tensor import WireTensor, num_bytes
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.sampling import check_token_ids
from service_kit.errors import Unimplemented
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2

# Placeholder id at positions with an embedding; it is never used.
_NO_TOKEN = 0
_DTYPES = {
    tensor_pb2.D_TYPE_FP32: "fp32",
    tensor_pb2.D_TYPE_FP16: "fp16",
    tensor_pb2.D_TYPE_BF16: "bf16",
}
# Hashing this many bytes takes about as long as a switch to another thread and back.
_QUICK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class EmbeddingPositions:
    """The embeddings of a prompt. `is_token` has a byte per position: 0 if it has an embedding, else 1."""

    tensor: WireTensor
    is_token: bytes

    @property
    def num_leading_positions(self) -> int:
        """Number of positions up to the last embedding. All later ones have tokens, and so a text."""
        return self.is_token.rindex(0) + 1

    def fill(self, entry: add_pb2.AddEntry) -> None:
        """Set the embeddings of an ADD's prompt, by reference."""
        entry.prompt_embeds.CopyFrom(self.tensor.reference)
        if any(self.is_token):
            entry.is_token = self.is_token
        else:
            entry.ClearField("prompt_token_ids")


def check_embeds(request: generate_pb2.GenerateRequest, model: ServedModel, violations: Violations) -> None:
    """Add violations of `request.embeds`. Raises Unimplemented if the model's engines take no embeddings."""
    if not model.takes_prompt_embeds:
        raise Unimplemented(
            f"not served: embeds (engines of model {model.name!r} run without --enable-prompt-embeds)",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": "embeds"},
        )
    embeds = request.embeds
    if not _check_tensor(embeds.embeds, model, violations):
        return
    num_positions, is_token = embeds.embeds.shape[0], embeds.is_token
    for name, num in (("token_ids", len(embeds.token_ids)), ("is_token", len(is_token))):
        rule = f"must be 0 or one for each of {num_positions} positions"
        violations.need(num in (0, num_positions), f"embeds.{name}", num, rule)
    violations.need(
        max(is_token, default=0) <= 1, "embeds.is_token", max(is_token, default=0), "must be 0 or 1"
    )
    if any(is_token) and not embeds.token_ids:
        violations.add("embeds.token_ids", [], "must not be empty where is_token has a 1")
    counting = [token_id for token_id, flag in zip(embeds.token_ids, is_token, strict=False) if flag]
    check_token_ids("embeds.token_ids", counting, model.vocab_size, violations)
    _check_options(request, violations)


def embedded_token_ids(embeds: generate_pb2.PromptEmbeds) -> list[int]:
    """The token id of each position of a checked prompt; a placeholder at those with an embedding."""
    if not any(embeds.is_token):
        return [_NO_TOKEN] * embeds.embeds.shape[0]
    pairs = zip(embeds.token_ids, embeds.is_token, strict=True)
    return [token_id if flag else _NO_TOKEN for token_id, flag in pairs]


async def embedding_positions(embeds: generate_pb2.PromptEmbeds) -> EmbeddingPositions | None:
    """The embeddings of a checked prompt at positions without a token; None if there are none."""
    tensor = embeds.embeds
    num_positions, hidden_size = tensor.shape
    is_token = embeds.is_token or bytes(num_positions)
    if all(is_token):
        return None
    shape, data = (is_token.count(0), hidden_size), tensor.inline
    if any(is_token):
        data = _rows_without_token(data, is_token, num_bytes(tensor.dtype, [hidden_size]))
    if len(data) <= _QUICK_BYTES:
        return EmbeddingPositions(WireTensor.of(tensor.dtype, shape, data), is_token)
    return EmbeddingPositions(await asyncio.to_thread(WireTensor.of, tensor.dtype, shape, data), is_token)


def _check_tensor(tensor: tensor_pb2.Tensor, model: ServedModel, violations: Violations) -> bool:
    """Whether dtype and shape fit the model, and the number of bytes fits them."""
    field, shape, num_before = "embeds.embeds", list(tensor.shape), violations.num_found
    known = ", ".join(_DTYPES.values())
    violations.need(tensor.dtype in _DTYPES, f"{field}.dtype", tensor.dtype, f"must be one of {known}")
    rule = f"must be [positions, {model.hidden_size}] with at least 1 position"
    is_shape = len(shape) == 2 and shape[0] >= 1 and shape[1] == model.hidden_size
    violations.need(is_shape, f"{field}.shape", shape, rule)
    # References are for services only: a client must not make the frontend read what it names.
    kind = tensor.WhichOneof("payload")
    violations.need(kind == "inline", f"{field}.payload", kind, "must be inline")
    if violations.num_found > num_before:
        return False
    expected, found = num_bytes(tensor.dtype, shape), len(tensor.inline)
    violations.need(found == expected, f"{field}.inline", f"{found} bytes", f"must be {expected} bytes")
    return found == expected


def _check_options(request: generate_pb2.GenerateRequest, violations: Violations) -> None:
    """Add violations for options that need a token at every position."""
    rule = "must be unset for a prompt that has positions without a token"
    if request.HasField("truncate_prompt_tokens"):
        violations.add("truncate_prompt_tokens", request.truncate_prompt_tokens, rule)
    if request.embeds.is_token and all(request.embeds.is_token):
        return
    if request.sampling.HasField("prompt_logprobs"):
        violations.add("sampling.prompt_logprobs", request.sampling.prompt_logprobs, rule)
    if request.return_prompt_token_ids:
        violations.add("return_prompt_token_ids", True, rule)


def _rows_without_token(data: bytes, is_token: bytes, row_bytes: int) -> bytes:
    view, parts, first = memoryview(data), [], 0
    for flag, stretch in groupby(is_token):
        end = first + sum(1 for _ in stretch)
        if not flag:
            parts.append(view[first * row_bytes : end * row_bytes])
        first = end
    return b"".join(parts)
