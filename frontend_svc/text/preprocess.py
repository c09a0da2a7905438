"""From a client's request to an ADD: check, tokenize, complete. Knows no engine and no stream."""

from __future__ import annotations

import secrets
import sys
from array import array
from dataclasses import dataclass

from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.sampling import check_sampling, check_token_ids, complete_sampling, refuse_unserved
from service_kit.errors import InvalidArgument, Unimplemented
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2

_UNSERVED_FIELDS = ("adapter", "media")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be sent: its ADD, without handle and trace, and its prompt's ids."""

    entry: add_pb2.AddEntry
    prompt_token_ids: list[int]


def check_request(request: generate_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits) -> None:
    """Raise InvalidArgument for all that is out of its range, then Unimplemented for what is not served.

    Lengths that need the prompt's tokens are checked by `build_entry`.
    """
    violations = Violations()
    kind = request.WhichOneof("input")
    if kind is None:
        violations.add("input", None, "must be one of prompt, token_ids, embeds")
    elif kind == "prompt":
        violations.need(request.prompt != "", "prompt", request.prompt, "must not be empty")
    elif kind == "token_ids":
        ids = request.token_ids.ids
        violations.need(len(ids) > 0, "token_ids", [], "must not be empty")
        check_token_ids("token_ids", list(ids), model.vocab_size, violations)
    check_sampling(request.sampling, vocab_size=model.vocab_size, limits=limits, violations=violations)
    _check_placement(request, limits, violations)
    violations.raise_if_any()
    refuse_unserved(request.sampling)
    names = [name for name in _UNSERVED_FIELDS if getattr(request, name)] + (
        ["embeds"] if kind == "embeds" else []
    )
    if names:
        shown = ", ".join(names)
        raise Unimplemented(
            f"not served yet: {shown}", reason="PARAMETER_NOT_SERVED", metadata={"fields": shown}
        )


async def tokenize_prompt(request: generate_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    """The prompt's token ids, truncated where the client asked for it.

    Text that cannot fit whatever its tokens are is refused here, before any work goes into it.
    """
    if request.WhichOneof("input") == "token_ids":
        token_ids = list(request.token_ids.ids)
    else:
        at_least = model.tokenizer.min_num_tokens(request.prompt)
        if at_least >= model.max_model_len and not request.HasField("truncate_prompt_tokens"):
            raise _too_long("prompt", f"at least {at_least}", at_least, model.max_model_len)
        check_text("prompt", request.prompt, model)
        has_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await model.tokenizer.encode(request.prompt, add_special_tokens=has_special)
    if not request.HasField("truncate_prompt_tokens"):
        return token_ids
    num_kept = request.truncate_prompt_tokens
    if num_kept < 0:
        num_kept = max(1, model.max_model_len - max(1, request.sampling.max_tokens))
    return token_ids[-num_kept:]


def check_text(field: str, text: str, model: ServedModel) -> None:
    """Raise InvalidArgument for text that takes too long to tokenize, whatever is done with its tokens."""
    violations = Violations()
    violations.need_count(field, len(text), "characters", 0, model.max_text_chars)
    violations.raise_if_any()


def build_entry(
    request: generate_pb2.GenerateRequest, prompt_token_ids: list[int], model: ServedModel
) -> Prepared:
    """The ADD of a checked request. Raises InvalidArgument when prompt and output cannot fit the model."""
    field = "prompt" if request.WhichOneof("input") == "prompt" else "token_ids"
    num_prompt, limit = len(prompt_token_ids), model.max_model_len
    if num_prompt == 0:
        raise InvalidArgument(
            f"{field} has no tokens, it must have at least 1", reason="INVALID_REQUEST", field=field
        )
    if num_prompt >= limit:
        raise _too_long(field, str(num_prompt), num_prompt, limit)
    sampling, max_fitting = request.sampling, limit - num_prompt
    for name in ("max_tokens", "min_tokens"):
        if getattr(sampling, name) > max_fitting:
            raise _too_many_asked(name, getattr(sampling, name), num_prompt, limit)
    entry = add_pb2.AddEntry(
        request_id=secrets.token_hex(16),
        external_request_id=request.request_id,
        prompt_token_ids=_column(prompt_token_ids),
        sampling=complete_sampling(
            sampling,
            model.defaults,
            vocab_size=model.vocab_size,
            max_new_tokens=max_fitting,
        ),
        # Drawn where the client gave none, so that any engine can continue the request exactly.
        request_seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        priority=request.priority,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        job_id=request.job_id,
        is_last_step=request.is_last_step,
    )
    if request.HasField("data_parallel_rank"):
        entry.data_parallel_rank = request.data_parallel_rank
    if sampling.HasField("skip_reading_prefix_cache"):
        entry.skip_reading_prefix_cache = sampling.skip_reading_prefix_cache
    return Prepared(entry, prompt_token_ids)


def _check_placement(
    request: generate_pb2.GenerateRequest, limits: RequestLimits, violations: Violations
) -> None:
    top, longest = limits.max_priority, limits.max_id_chars
    violations.need(abs(request.priority) <= top, "priority", request.priority, f"must be in -{top}..{top}")
    for name in ("request_id", "session_id", "job_id", "cache_salt"):
        violations.need_count(name, len(getattr(request, name)), "characters", 0, longest)
    if request.HasField("data_parallel_rank"):
        rank = request.data_parallel_rank
        violations.need(0 <= rank < 2**32, "data_parallel_rank", rank, f"must be in 0..{2**32 - 1}")
    if request.HasField("truncate_prompt_tokens"):
        num_kept = request.truncate_prompt_tokens
        violations.need(
            num_kept == -1 or num_kept >= 1, "truncate_prompt_tokens", num_kept, "must be -1 or at least 1"
        )


def _too_long(field: str, shown: str, num_tokens: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{field} has {shown} tokens, the model takes {limit} with at least 1 of them for the output",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
        metadata={"num_tokens": str(num_tokens), "max_model_len": str(limit)},
    )


def _too_many_asked(name: str, asked: int, num_prompt: int, limit: int) -> InvalidArgument:
    field = f"sampling.{name}"
    return InvalidArgument(
        f"{field} is {asked}, but {num_prompt} prompt tokens leave only {limit - num_prompt} of {limit}",
        field=field,
        reason="CONTEXT_LENGTH_EXCEEDED",
        metadata={"num_tokens": str(num_prompt + asked), "max_model_len": str(limit)},
    )


def _column(token_ids: list[int]) -> bytes:
    column = array("I", token_ids)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
