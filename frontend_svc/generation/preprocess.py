"""Turns a client's request into the ADDs of its sampling group: checks, tokenizes, completes it.

Knows no engine, and of what a client can ask for only where the request runs: all else are options.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor

from frontend_svc.engines.routing.engine_info import EngineNeed
from frontend_svc.generation.caller import Caller
from frontend_svc.options import OPTIONS
from frontend_svc.options.option import AnyRequest, PreparedPrompt
from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import Prompt
from frontend_svc.text.tokenize.id_column import id_column
from triptych.api.v1 import chat_message_pb2, generate_pb2, model_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import Unimplemented
from triptych_kit.rules import MessageRules

# What the frontend itself reads of requests. Every other field is of an option, or refused.
CORE_FIELDS = frozenset((
    "model", "prompt", "token_ids", "sampling", "add_special_tokens", "truncate_prompt_tokens",
    "return_prompt_token_ids", "orphan_grace_ms", "request_id", "priority", "cache_salt", "session_id",
    "data_parallel_rank",
    "messages", "tools", "tool_choice", "parallel_tool_calls", "template_options", "stop_in_all_text",
))  # fmt: skip
_SERVED = CORE_FIELDS.union(*(option.fields for option in OPTIONS))

# Prompts check their inputs in slices, and an option its tensors.
_CHECKED_APART = ("token_ids", "embeds", "messages", "tools", "template_options")
_RULES: dict[type[AnyRequest], MessageRules] = {
    message: MessageRules(message, apart=_CHECKED_APART)
    for message in (generate_pb2.GenerateRequest, chat_message_pb2.ChatRequest)
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent: its prompt, and an ADD for each of n outputs, without handles and trace."""

    prompt: PreparedPrompt
    entries: list[add_pb2.AddEntry]


def needs_of(request: AnyRequest) -> tuple[EngineNeed, ...]:
    """Requirements of the request's options."""
    return tuple(need for option in OPTIONS if (need := option.need(request)) is not None)


def describe(model: ServedModel, card: model_pb2.Model) -> None:
    """Add to the card of a model what its engines serve of the options."""
    for option in OPTIONS:
        option.describe(model, card)


async def check_request(
    request: AnyRequest, prompt: Prompt, model: ServedModel, limits: RequestLimits
) -> None:
    """Raise InvalidArgument for values out of range, then Unimplemented for unsupported parameters.

    Lengths in tokens are checked by `prepare`.
    """
    violations = Violations()
    await prompt.check(model, violations)
    violations.extend(_RULES[type(request)].violations(request, limits.named(model)))
    for option in OPTIONS:
        option.check(request, model, violations)
    violations.raise_if_any()
    for field in _set_unserved_fields(request):
        raise Unimplemented(
            f"not served yet: {field}", reason="PARAMETER_NOT_SERVED", metadata={"fields": field}
        )
    if model.supported_tasks and "generate" not in model.supported_tasks:
        supported = ", ".join(model.supported_tasks)
        raise Unimplemented(
            f"model {model.name!r} does not support generate; it supports: {supported}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"model": model.name, "task": "generate", "supported_tasks": supported},
        )


async def prepare(request: AnyRequest, prompt: Prompt, model: ServedModel, caller: Caller) -> Prepared:
    """Tokenize a checked request and complete it. Raises InvalidArgument if it cannot fit the model."""
    token_ids = await _tokenize(request, prompt, model)
    texts = model.tokenizer.token_texts if has_text(request.sampling) else None
    prepared = PreparedPrompt(
        prompt.field,
        model,
        token_ids,
        token_ids,
        texts,
        opens_reasoning=prompt.opens_reasoning,
        may_open_reasoning=prompt.may_open_reasoning,
        scoped=caller.scoped,
    )
    entry = _entry(request, token_ids, caller)
    for option in OPTIONS:
        await option.prepare(request, prepared, entry)
    return Prepared(prepared, _group(entry, prepared.first, max(1, request.sampling.n)))


def has_text(sampling: sampling_pb2.SamplingParams) -> bool:
    """Whether the client wants text beside token ids."""
    return not sampling.HasField("detokenize") or sampling.detokenize


def _set_unserved_fields(request: AnyRequest) -> Iterator[str]:
    """Names of set fields, of the request and of its sampling parameters, that are not served."""
    for prefix, message in (("", request), ("sampling.", request.sampling)):
        for name, has_presence in _unserved_fields(message.DESCRIPTOR, prefix):
            # What is served is not looked at: each look at a long text decodes it.
            if message.HasField(name) if has_presence else getattr(message, name):
                yield prefix + name


@functools.cache
def _unserved_fields(descriptor: Descriptor, prefix: str) -> list[tuple[str, bool]]:
    return [
        (field.name, field.has_presence) for field in descriptor.fields if prefix + field.name not in _SERVED
    ]


async def _tokenize(request: AnyRequest, prompt: Prompt, model: ServedModel) -> list[int]:
    is_truncated = request.HasField("truncate_prompt_tokens")
    token_ids = await prompt.tokenize(model, may_be_long=is_truncated)
    if not is_truncated:
        return token_ids
    num_kept = request.truncate_prompt_tokens
    if num_kept < 0:
        num_kept = max(1, model.max_model_len - max(1, request.sampling.max_tokens))
    return token_ids[-num_kept:]


def _entry(request: AnyRequest, token_ids: list[int], caller: Caller) -> add_pb2.AddEntry:
    sampling = request.sampling
    entry = add_pb2.AddEntry(
        external_request_id=request.request_id,
        prompt_token_ids=id_column(token_ids),
        sampling=sampling_pb2.SamplingParams(),
        # A random seed if the client gave none, so that any engine can continue the request exactly.
        request_seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        priority=request.priority,
        account=caller.identity.account,
        weight=caller.identity.limits.weight,
        # No tenant can find out by timing what another one has sent.
        cache_salt=caller.scoped(request.cache_salt),
    )
    if request.HasField("data_parallel_rank"):
        entry.data_parallel_rank = request.data_parallel_rank
    return entry


def _group(entry: add_pb2.AddEntry, first: add_pb2.AddEntry, n: int) -> list[add_pb2.AddEntry]:
    """The ADDs of `n` outputs of one prompt, each with its own seed; that of output 0 also has `first`."""
    if n == 1:
        entry.request_id = secrets.token_hex(16)
        entry.MergeFrom(first)
        return [entry]
    entries, group_id = [], secrets.token_hex(16)
    for index in range(n):
        child = add_pb2.AddEntry()
        child.CopyFrom(entry)
        child.request_id = secrets.token_hex(16)
        child.group_id, child.group_index = group_id, index
        child.request_seed = child_seed(entry.request_seed, index)
        entries.append(child)
    entries[0].MergeFrom(first)
    return entries


def child_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a sampling group: the group's seed for the first, else derived from it.

    A hash and not a sum, so that groups with adjacent seeds share no output seed.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
