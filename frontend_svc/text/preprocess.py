"""Turns a client's request into the ADDs of its sampling group: checks, tokenizes, completes it.

Knows no engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from frontend_svc.parsers.registry import reasoning_parser
from frontend_svc.tensors.wire_tensor import WireTensor
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

# Both have the same fields for sampling and placement.
AnyRequest: TypeAlias = "generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest"
_BAD_WORDS = "sampling.bad_words"
_MAX_SEQUENCES = 1024
_MAX_SEQUENCE_IDS = 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent: an ADD for each of n outputs, without handles and trace; the prompt's ids.

    The ADDs refer to `tensors` by digest. Not all of the first `num_leading_positions` of the prompt are
    tokens.
    """

    entries: list[add_pb2.AddEntry]
    prompt_token_ids: list[int]
    tensors: tuple[WireTensor, ...] = ()
    num_leading_positions: int = 0


def check_request(request: AnyRequest, prompt: Prompt, model: ServedModel, limits: RequestLimits) -> None:
    """Raise InvalidArgument for values out of range, then Unimplemented for unsupported parameters.

    Lengths in tokens are checked by `prepare`.
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
    """Tokenize a checked request and complete it. Raises InvalidArgument if it cannot fit the model."""
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
    """The tokens that begin and end the model's reasoning. Raises Unimplemented if they are not known."""
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


class WordTokenizer(Protocol):
    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


async def bad_word_sequences(words: Sequence[str], tokenizer: WordTokenizer) -> list[list[int]]:
    """Token sequences that the engine forbids: the last id may not follow the others. Without duplicates.

    A word has two forms: at the start of a text, and with a preceding space, for which most vocabularies
    have separate tokens. The second is left out if it ends with the first, which forbids it already. A
    leading space in the client's word is ignored.

    Raises InvalidArgument with a violation for each word that has no tokens or too many.
    """
    violations = Violations()
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        plain = await tokenizer.encode(bare, add_special_tokens=False)
        violations.need_count(_BAD_WORDS, len(plain), "tokens", 1, _MAX_SEQUENCE_IDS, index=index)
        if not 1 <= len(plain) <= _MAX_SEQUENCE_IDS:
            continue
        spaced = await tokenizer.encode(f" {bare}", add_special_tokens=False)
        found[tuple(plain)] = None
        if spaced[-len(plain) :] != plain and 1 <= len(spaced) <= _MAX_SEQUENCE_IDS:
            found[tuple(spaced)] = None
    violations.need_count(_BAD_WORDS, len(found), "token sequences", 0, _MAX_SEQUENCES)
    violations.raise_if_any()
    return [list(sequence) for sequence in found]


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
        # A random seed if the client gave none, so that any engine can continue the request exactly.
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
    """The ADDs of `n` outputs of one prompt, each with its own seed; the first reports prompt logprobs."""
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
    """The seed of output `index` of a sampling group: the group's seed for the first, else derived from it.

    A hash and not a sum, so that groups with adjacent seeds share no output seed.
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
