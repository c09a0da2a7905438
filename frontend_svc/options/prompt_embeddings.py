"""Prompts with embeddings at some or all positions.

Never looks into the bytes: the engine checks whether they are finite numbers.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TypeGuard

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.tensors.wire_tensor import WireTensor, num_bytes
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.tokenize.id_column import id_column
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import Unimplemented

# Placeholder id at positions with an embedding; it is never used.
_NO_TOKEN = 0
_DTYPES = {
    tensor_pb2.D_TYPE_FP32: "fp32",
    tensor_pb2.D_TYPE_FP16: "fp16",
    tensor_pb2.D_TYPE_BF16: "bf16",
}
# Hashing this many bytes takes about as long as a switch to another thread and back.
_QUICK_BYTES = 256 * 1024
_NEED = EngineNeed("takes embeds", "EMBEDS_NOT_READY", lambda model: model.ready.takes_prompt_embeds)


class PromptEmbeddings(RequestOption):
    """The ADD has the embeddings of the positions without a token, by reference."""

    fields = ("embeds",)

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        if not _has_embeds(request):
            return
        if not model.ready.takes_prompt_embeds:
            raise Unimplemented(
                f"not served: embeds (engines of model {model.name!r} run without --enable-prompt-embeds)",
                reason="PARAMETER_NOT_SERVED",
                metadata={"fields": "embeds"},
            )
        embeds = request.embeds
        if not _check_tensor(embeds.embeds, model.ready.hidden_size, violations):
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
        violations.need_ids("embeds.token_ids", counting, model.vocab_size)
        _check_options(request, violations)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        if not _has_embeds(request):
            return
        embeds = request.embeds
        is_token = embeds.is_token or bytes(embeds.embeds.shape[0])
        prompt.token_ids = prompt.context_ids = _token_ids(embeds, is_token)
        if any(is_token):
            entry.prompt_token_ids = id_column(prompt.token_ids)
        if all(is_token):
            return
        tensor = await _embeddings(embeds.embeds, is_token)
        entry.prompt_embeds.CopyFrom(tensor.reference)
        if any(is_token):
            entry.is_token = is_token
        prompt.tensors.append(tensor)
        # All positions behind the last embedding have tokens, and so a text.
        prompt.context_ids = prompt.token_ids[is_token.rindex(0) + 1 :]

    def need(self, request: AnyRequest) -> EngineNeed | None:
        return _NEED if _has_embeds(request) else None


def _has_embeds(request: AnyRequest) -> TypeGuard[generate_pb2.GenerateRequest]:
    return isinstance(request, generate_pb2.GenerateRequest) and request.HasField("embeds")


def _token_ids(embeds: generate_pb2.PromptEmbeds, is_token: bytes) -> list[int]:
    """The token id of each position of a checked prompt; a placeholder at those with an embedding."""
    if not any(is_token):
        return [_NO_TOKEN] * len(is_token)
    pairs = zip(embeds.token_ids, is_token, strict=True)
    return [token_id if flag else _NO_TOKEN for token_id, flag in pairs]


async def _embeddings(tensor: tensor_pb2.Tensor, is_token: bytes) -> WireTensor:
    """The rows of a checked tensor at positions without a token."""
    hidden_size = tensor.shape[1]
    shape, data = (is_token.count(0), hidden_size), tensor.inline
    if any(is_token):
        data = _rows_without_token(data, is_token, num_bytes(tensor.dtype, [hidden_size]))
    if len(data) <= _QUICK_BYTES:
        return WireTensor.of(tensor.dtype, shape, data)
    return await asyncio.to_thread(WireTensor.of, tensor.dtype, shape, data)


def _check_tensor(tensor: tensor_pb2.Tensor, hidden_size: int, violations: Violations) -> bool:
    """Whether dtype and shape fit the model, and the number of bytes fits them."""
    field, shape, num_before = "embeds.embeds", list(tensor.shape), violations.num_found
    violations.need_enum(f"{field}.dtype", tensor.dtype, tensor_pb2.DType, _DTYPES)
    rule = f"must be [positions, {hidden_size}] with at least 1 position"
    is_shape = len(shape) == 2 and shape[0] >= 1 and shape[1] == hidden_size
    violations.need(is_shape, f"{field}.shape", shape, rule)
    # References are for services only: a client must not make the frontend read what it names.
    kind = tensor.WhichOneof("payload")
    violations.need(kind == "inline", f"{field}.payload", kind, "must be inline")
    if violations.num_found > num_before:
        return False
    expected, num_inline = num_bytes(tensor.dtype, shape), len(tensor.inline)
    violations.need(
        num_inline == expected, f"{field}.inline", f"{num_inline} bytes", f"must be {expected} bytes"
    )
    return num_inline == expected


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
