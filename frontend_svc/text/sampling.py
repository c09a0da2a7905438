"""Sampling parameters: checked, refused by name where they cannot be served, and completed for the engine."""

from __future__ import annotations

import math

from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import GenerationDefaults
from service_kit.errors import Unimplemented
from triptych.common.v1 import sampling_pb2

_UNSERVED_OPTIONALS = (
    "logprobs",
    "prompt_logprobs",
    "structured_output",
    "thinking_token_budget",
)
_UNSERVED_LISTS = ("bad_words", "logprob_token_ids")


def check_sampling(
    sampling: sampling_pb2.SamplingParams, *, vocab_size: int, limits: RequestLimits, violations: Violations
) -> None:
    """Note every value outside of its range, whether it can be served or not."""
    _check_numbers(sampling, vocab_size, limits, violations)
    _check_counts(sampling, limits, violations)
    count = violations.need_count
    count("sampling.stop", len(sampling.stop), "strings", 0, limits.max_stop_strings)
    for index, stop in enumerate(sampling.stop[: limits.max_stop_strings]):
        count("sampling.stop", len(stop), "characters", 1, limits.max_stop_string_chars, index=index)
    _check_repetition(sampling.repetition_detection, limits, violations)
    if sampling.stop and sampling.HasField("detokenize") and not sampling.detokenize:
        violations.add("sampling.detokenize", False, "must be true where stop strings are given")
    count("sampling.stop_token_ids", len(sampling.stop_token_ids), "ids", 0, limits.max_stop_token_ids)
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(f"sampling.{field}", getattr(sampling, field), vocab_size, violations)


def check_token_ids(field: str, token_ids: list[int], vocab_size: int, violations: Violations) -> None:
    """Note the first id that the model does not have."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        violations.add(
            field, token_ids[index], f"must be below the vocabulary size of {vocab_size}", index=index
        )


def refuse_unserved(sampling: sampling_pb2.SamplingParams) -> None:
    """Raise Unimplemented that names what is asked for and cannot be served: it is never ignored."""
    unserved = ["n"] if sampling.HasField("n") and sampling.n != 1 else []
    unserved += [name for name in _UNSERVED_OPTIONALS if sampling.HasField(name)]
    unserved += [name for name in _UNSERVED_LISTS if getattr(sampling, name)]
    if sampling.spaces_between_special_tokens and sampling.HasField("skip_special_tokens"):
        unserved += [] if sampling.skip_special_tokens else ["spaces_between_special_tokens"]
    if unserved:
        names = ", ".join(f"sampling.{name}" for name in unserved)
        raise Unimplemented(
            f"not served yet: {names}", reason="PARAMETER_NOT_SERVED", metadata={"fields": names}
        )


def complete_sampling(
    sampling: sampling_pb2.SamplingParams,
    defaults: GenerationDefaults,
    *,
    vocab_size: int,
    max_new_tokens: int,
) -> sampling_pb2.SamplingParams:
    """What the engine needs, nothing left unset: the client's values, else the model's, else the plain ones.

    `max_new_tokens` is what fits the model. What concerns text alone stays here, and the model's
    end-of-sequence ids are the engine's own.
    """
    complete = sampling_pb2.SamplingParams(
        temperature=_chosen(sampling, "temperature", defaults.temperature, 1.0),
        top_p=_chosen(sampling, "top_p", defaults.top_p, 1.0),
        top_k=int(_chosen(sampling, "top_k", defaults.top_k, 0)),
        max_tokens=sampling.max_tokens
        if sampling.HasField("max_tokens")
        else min(max_new_tokens, defaults.max_new_tokens or max_new_tokens),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=dict.fromkeys(sampling.allowed_token_ids),
    )
    # Zero is all tokens, as are minus one and anything that exceeds the vocabulary.
    complete.top_k = complete.top_k if 0 < complete.top_k < vocab_size else 0
    complete.min_tokens = min(complete.min_tokens, complete.max_tokens)
    complete.stop_token_ids.extend(dict.fromkeys(sampling.stop_token_ids))
    detection = sampling.repetition_detection
    if detection.max_pattern_size:
        complete.repetition_detection.CopyFrom(detection)
        complete.repetition_detection.min_pattern_size = max(1, detection.min_pattern_size)
    return complete


def _check_numbers(
    sampling: sampling_pb2.SamplingParams, vocab_size: int, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, is_fine: bool, rule: str) -> None:
        if sampling.HasField(name):
            value = getattr(sampling, name)
            violations.need(is_fine and math.isfinite(value), f"sampling.{name}", _plain(value), rule)

    top, penalty = limits.max_temperature, limits.max_penalty
    check("temperature", 0 <= sampling.temperature <= top, f"must be finite and in 0..{top:g}")
    check("top_p", 0 < sampling.top_p <= 1, "must be above 0 and at most 1")
    check("top_k", sampling.top_k >= -1, "must be -1, 0 (both: all tokens) or more")
    check("min_p", 0 <= sampling.min_p <= 1, "must be in 0..1")
    for name in ("presence_penalty", "frequency_penalty"):
        check(name, abs(getattr(sampling, name)) <= penalty, f"must be in -{penalty:g}..{penalty:g}")
    check("repetition_penalty", sampling.repetition_penalty > 0, "must be finite and above 0")
    violations.need_count(
        "sampling.logit_bias", len(sampling.logit_bias), "entries", 0, limits.max_logit_bias
    )
    bound = limits.max_abs_logit_bias
    for index, entry in enumerate(sampling.logit_bias[: limits.max_logit_bias]):
        is_fine = math.isfinite(entry.bias) and abs(entry.bias) <= bound
        rule = f"must be in -{bound:g}..{bound:g}"
        violations.need(is_fine, "sampling.logit_bias", _plain(entry.bias), rule, index=index)
    ids = [entry.token_id for entry in sampling.logit_bias]
    check_token_ids("sampling.logit_bias", ids, vocab_size, violations)


def _check_counts(
    sampling: sampling_pb2.SamplingParams, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, is_fine: bool, rule: str) -> None:
        if sampling.HasField(name):
            violations.need(is_fine, f"sampling.{name}", getattr(sampling, name), rule)

    check("max_tokens", sampling.max_tokens >= 1, "must be at least 1")
    check("min_tokens", sampling.min_tokens >= 0, "must be at least 0")
    if sampling.HasField("max_tokens") and sampling.max_tokens >= 1:
        check(
            "min_tokens",
            sampling.min_tokens <= sampling.max_tokens,
            f"must be at most max_tokens, {sampling.max_tokens}",
        )
    check("n", 1 <= sampling.n <= limits.max_n, f"must be in 1..{limits.max_n}")
    for name in ("logprobs", "prompt_logprobs"):
        rule = f"must be in 0..{limits.max_logprobs}"
        check(name, 0 <= getattr(sampling, name) <= limits.max_logprobs, rule)
    interval = limits.max_stream_interval
    check("stream_interval", 1 <= sampling.stream_interval <= interval, f"must be in 1..{interval}")
    violations.need_count("sampling.bad_words", len(sampling.bad_words), "words", 0, limits.max_bad_words)
    kinds = sampling_pb2.OutputKind.values()
    violations.need(
        sampling.output_kind in kinds, "sampling.output_kind", sampling.output_kind, f"must be one of {kinds}"
    )


def _check_repetition(
    detection: sampling_pb2.RepetitionDetection, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, least: int, most: int) -> None:
        value = getattr(detection, name)
        field = f"sampling.repetition_detection.{name}"
        violations.need(least <= value <= most, field, value, f"must be in {least}..{most}")

    check("max_pattern_size", 0, limits.max_pattern_size)
    longest = detection.max_pattern_size
    check("min_pattern_size", 0, max(0, min(longest, limits.max_pattern_size)))
    # Without a longest pattern nothing is looked for, however often.
    if longest:
        check("min_count", 2, limits.max_pattern_count)


def _chosen(sampling: sampling_pb2.SamplingParams, name: str, default: float | None, plain: float) -> float:
    if sampling.HasField(name):
        value: float = getattr(sampling, name)
        return value
    return plain if default is None else default


def _plain(value: float) -> float:
    # A float of the wire has seven digits; more of them would show what nobody has typed.
    return value if isinstance(value, int) else float(f"{value:.7g}")
