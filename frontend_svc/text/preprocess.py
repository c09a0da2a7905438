"""From a client's request to the ADDs of its sampling group: check, tokenize, complete. Knows no engine."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TypeAlias

from frontend_svc.parsers.registry import reasoning_parser
from frontend_svc.tensors.wire_tensor import WireTensor
from frontend_svc.text.bad_words import bad_word_sequences
from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import Prompt, too_long
from frontend_svc.text.sampling import (
    check_fit,
    check_sampling,
    complete_sampling,
    has_thinking_budget,
    refuse_unserved,
)
from frontend_svc.text.tokenize.id_column import id_column
from service_kit.errors import InvalidArgument, Unimplemented
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.engine.v1 import add_pb2

# What both have in common: sampling, and where and how the request is to run.
AnyRequest: TypeAlias = "generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What can be sent: an ADD for each of n outputs, without handles and trace; and the prompt's ids.

    The ADDs refer to `tensors` by digest. The first `num_leading_positions` of the prompt are not all tokens.
    """

    entries: list[add_pb2.AddEntry]
    prompt_token_ids: list[int]
    tensors: tuple[WireTensor, ...] = ()
    num_leading_positions: int = 0


def check_request(request: AnyRequest, prompt: Prompt, model: ServedModel, limits: RequestLimits) -> None:
    """Raise InvalidArgument for all that is out of its range, then Unimplemented for what is not served.

    Lengths that need the prompt's tokens are checked by `prepare`.
    """
    violations = Violations()
    prompt.check(model, violations)
    check_sampling(
        request.sampling,
        vocab_size=model.vocab_size,
        limits=limits,
        violations=violations,
        defaults=model.defaults,
    )
    _check_placement(request, limits, violations)
    violations.raise_if_any()
    refuse_unserved(request.sampling)
    if model.supported_tasks and "generate" not in model.supported_tasks:
        supported = ", ".join(model.supported_tasks)
        raise Unimplemented(
            f"model {model.name!r} does not support generate; it supports: {supported}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"model": model.name, "task": "generate", "supported_tasks": supported},
        )
    if request.adapter:
        raise Unimplemented(
            "not served yet: adapter", reason="PARAMETER_NOT_SERVED", metadata={"fields": "adapter"}
        )


async def prepare(request: AnyRequest, prompt: Prompt, model: ServedModel, limits: RequestLimits) -> Prepared:
    """Tokenize a checked request and complete it. Raises InvalidArgument when it cannot fit the model."""
    token_ids = await _tokenize(request, prompt, model)
    _check_length(prompt.field, len(token_ids), model.max_model_len)
    check_fit(
        request.sampling,
        num_prompt_tokens=len(token_ids),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        limits=limits,
    )
    words = request.sampling.bad_words
    sequences = await bad_word_sequences(list(words), model.tokenizer) if words else []
    entry = _entry(request, token_ids, sequences, model, limits)
    if has_thinking_budget(request.sampling):
        entry.reasoning_options.CopyFrom(await _reasoning_markers(model))
    embedded = await prompt.embedded()
    if embedded is not None:
        embedded.fill(entry)
    entries = _group(entry, max(1, request.sampling.n))
    if embedded is None:
        return Prepared(entries, token_ids)
    return Prepared(entries, token_ids, (embedded.tensor,), embedded.num_leading_positions)


async def _reasoning_markers(model: ServedModel) -> add_pb2.ReasoningOptions:
    """The tokens between which the model reasons. Raises Unimplemented where they are not known."""
    reasoning = reasoning_parser(model.parsers.reasoning)
    if reasoning is None:
        raise Unimplemented(
            f"sampling.thinking_token_budget: no reasoning parser is known for model {model.name!r}",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": "sampling.thinking_token_budget"},
        )
    opening, closing = reasoning.block
    return add_pb2.ReasoningOptions(
        start_token_ids=await model.tokenizer.encode(opening, add_special_tokens=False),
        end_token_ids=await model.tokenizer.encode(closing, add_special_tokens=False),
    )


async def _tokenize(request: AnyRequest, prompt: Prompt, model: ServedModel) -> list[int]:
    is_truncated = request.HasField("truncate_prompt_tokens")
    token_ids = await prompt.tokenize(model, may_be_long=is_truncated)
    if not is_truncated:
        return token_ids
    num_kept = request.truncate_prompt_tokens
    if num_kept < 0:
        num_kept = max(1, model.max_model_len - max(1, request.sampling.max_tokens))
    return token_ids[-num_kept:]


def _check_length(field: str, num_prompt: int, limit: int) -> None:
    if num_prompt == 0:
        raise InvalidArgument(
            f"{field} has no tokens, it must have at least 1", reason="INVALID_REQUEST", field=field
        )
    if num_prompt >= limit:
        raise too_long(field, str(num_prompt), num_prompt, limit)


def _entry(
    request: AnyRequest,
    token_ids: list[int],
    bad_words: list[list[int]],
    model: ServedModel,
    limits: RequestLimits,
) -> add_pb2.AddEntry:
    sampling = request.sampling
    entry = add_pb2.AddEntry(
        external_request_id=request.request_id,
        prompt_token_ids=id_column(token_ids),
        sampling=complete_sampling(
            sampling,
            model.defaults,
            vocab_size=model.vocab_size,
            max_new_tokens=model.max_model_len - len(token_ids),
        ),
        # Drawn where the client gave none, so that any engine can continue the request exactly.
        request_seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        priority=request.priority,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        job_id=request.job_id,
        is_last_step=request.is_last_step,
        bad_words=[add_pb2.TokenSequence(token_ids=id_column(ids)) for ids in bad_words],
    )
    if request.HasField("data_parallel_rank"):
        entry.data_parallel_rank = request.data_parallel_rank
    if sampling.HasField("skip_reading_prefix_cache"):
        entry.skip_reading_prefix_cache = sampling.skip_reading_prefix_cache
    return entry


def _group(entry: add_pb2.AddEntry, n: int) -> list[add_pb2.AddEntry]:
    """The ADDs of `n` outputs of one prompt, each with noise of its own; the first tells of the prompt."""
    if n == 1:
        entry.request_id = secrets.token_hex(16)
        return [entry]
    entries, group_id = [], secrets.token_hex(16)
    for index in range(n):
        child = add_pb2.AddEntry()
        child.CopyFrom(entry)
        child.request_id = secrets.token_hex(16)
        child.group_id, child.group_index = group_id, index
        child.request_seed = child_seed(entry.request_seed, index)
        if index:
            child.sampling.ClearField("prompt_logprobs")
        entries.append(child)
    return entries


def child_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a sampling group: the group's own for the first, else derived from it.

    A hash and not a sum, so that the outputs of neighbouring seeds have nothing in common.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _check_placement(request: AnyRequest, limits: RequestLimits, violations: Violations) -> None:
    top, longest = limits.max_priority, limits.max_id_chars
    violations.need(abs(request.priority) <= top, "priority", request.priority, f"must be in -{top}..{top}")
    for name, value in (
        ("request_id", request.request_id),
        ("session_id", request.session_id),
        ("job_id", request.job_id),
        ("cache_salt", request.cache_salt),
    ):
        violations.need_count(name, len(value), "characters", 0, longest)
    if request.HasField("data_parallel_rank"):
        rank = request.data_parallel_rank
        violations.need(0 <= rank < 2**32, "data_parallel_rank", rank, f"must be in 0..{2**32 - 1}")
    if request.HasField("truncate_prompt_tokens"):
        num_kept = request.truncate_prompt_tokens
        violations.need(
            num_kept == -1 or num_kept >= 1, "truncate_prompt_tokens", num_kept, "must be -1 or at least 1"
        )
