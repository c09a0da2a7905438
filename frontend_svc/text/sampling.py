"""Checks sampling parameters, refuses unsupported ones by name, and completes them for the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from frontend_svc.text.limits import RequestLimits, Violations
from frontend_svc.text.model import GenerationDefaults
from service_kit.errors import Unimplemented
from triptych.common.v1 import sampling_pb2

# A temperature below the first is greedy; dividing logits by one below the second could overflow.
_GREEDY_TEMPERATURE = 1e-5
_MIN_TEMPERATURE = 0.01
_NO_DEFAULTS = GenerationDefaults()


def check_sampling(
    sampling: sampling_pb2.SamplingParams,
    *,
    vocab_size: int,
    limits: RequestLimits,
    violations: Violations,
    defaults: GenerationDefaults = _NO_DEFAULTS,
) -> None:
    """Add a violation for every value out of range, also for parameters that are not supported.

    `defaults` are the model's: they decide whether a request without a temperature is greedy.
    """
    _check_numbers(sampling, limits, violations)
    _check_counts(sampling, limits, violations)
    _check_group(sampling, defaults, limits, violations)
    _check_logprobs(sampling, vocab_size, limits, violations)
    _check_texts(sampling, limits, violations)
    _check_repetition(sampling.repetition_detection, limits, violations)
    _check_bias(sampling, vocab_size, limits, violations)
    for field, ids, most in (
        ("sampling.stop_token_ids", sampling.stop_token_ids, limits.max_stop_token_ids),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size),
        ("sampling.logprob_token_ids", sampling.logprob_token_ids, limits.max_logprob_token_ids),
    ):
        if violations.need_count(field, len(ids), "ids", 0, most):
            check_token_ids(field, ids, vocab_size, violations)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, violations: Violations) -> None:
    """Add a violation for the first id that is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        violations.add(
            field, token_ids[index], f"must be below the vocabulary size of {vocab_size}", index=index
        )


def check_fit(
    sampling: sampling_pb2.SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    limits: RequestLimits,
) -> None:
    """Raise InvalidArgument for parameters that are too large for a prompt of this length."""
    too_many = Violations()
    most = max_model_len - num_prompt_tokens
    rule = f"but {num_prompt_tokens} prompt tokens leave only {most} of {max_model_len}"
    asked = {"max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens}
    for name, value in asked.items():
        too_many.need(value <= most, f"sampling.{name}", value, rule)
    too_many.raise_if_any(
        "CONTEXT_LENGTH_EXCEEDED",
        {
            "num_tokens": str(num_prompt_tokens + max(asked.values())),
            "max_model_len": str(max_model_len),
        },
    )
    if sampling.HasField("prompt_logprobs"):
        entries = Violations()
        num_top = vocab_size if sampling.prompt_logprobs == -1 else sampling.prompt_logprobs
        num_each = num_top + len(sampling.logprob_token_ids)
        entries.need_count(
            "sampling.prompt_logprobs",
            num_each * num_prompt_tokens,
            f"entries for {num_prompt_tokens} prompt tokens",
            0,
            limits.max_prompt_logprob_entries,
        )
        entries.raise_if_any()


def refuse_unserved(sampling: sampling_pb2.SamplingParams) -> None:
    """Raise Unimplemented that names the unsupported parameters: they are never ignored."""
    if sampling.HasField("structured_output"):
        raise Unimplemented(
            "not served yet: sampling.structured_output",
            reason="PARAMETER_NOT_SERVED",
            metadata={"fields": "sampling.structured_output"},
        )


def complete_sampling(
    sampling: sampling_pb2.SamplingParams,
    defaults: GenerationDefaults,
    *,
    vocab_size: int,
    max_new_tokens: int,
) -> sampling_pb2.SamplingParams:
    """All parameters the engine needs, none unset: the client's values, else the model's, else neutral ones.

    `max_new_tokens` is what fits the model. Parameters that concern text alone are left out. n and bad_words
    are sent in other fields of the ADD. The engine knows the model's end-of-sequence ids and stops at each.
    """
    complete = sampling_pb2.SamplingParams(
        max_tokens=_max_tokens(sampling, defaults, max_new_tokens),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=_chosen(
            sampling, "presence_penalty", sampling.presence_penalty, defaults.presence_penalty, 0.0
        ),
        frequency_penalty=_chosen(
            sampling, "frequency_penalty", sampling.frequency_penalty, defaults.frequency_penalty, 0.0
        ),
        repetition_penalty=_chosen(
            sampling, "repetition_penalty", sampling.repetition_penalty, defaults.repetition_penalty, 1.0
        ),
        logit_bias=sampling.logit_bias,
        stop_token_ids=dict.fromkeys(sampling.stop_token_ids),
        allowed_token_ids=dict.fromkeys(sampling.allowed_token_ids),
        logprob_token_ids=sampling.logprob_token_ids,
    )
    _complete_draw(complete, sampling, defaults, vocab_size)
    if sampling.HasField("logprobs"):
        complete.logprobs = min(sampling.logprobs, vocab_size)
    if sampling.HasField("prompt_logprobs"):
        complete.prompt_logprobs = min(sampling.prompt_logprobs, vocab_size)
        # There are no logprobs of positions that are not computed.
        if not sampling.HasField("skip_reading_prefix_cache"):
            complete.skip_reading_prefix_cache = True
    if has_thinking_budget(sampling):
        complete.thinking_token_budget = sampling.thinking_token_budget
    detection = sampling.repetition_detection
    if detection.max_pattern_size:
        complete.repetition_detection.CopyFrom(detection)
        complete.repetition_detection.min_pattern_size = max(1, detection.min_pattern_size)
    return complete


def has_thinking_budget(sampling: sampling_pb2.SamplingParams) -> bool:
    """Whether the reasoning is limited. Some clients send -1 for no limit."""
    return sampling.HasField("thinking_token_budget") and sampling.thinking_token_budget != -1


def stream_interval(sampling: sampling_pb2.SamplingParams, limits: RequestLimits) -> int:
    """Tokens per delta: the client's value, but at least the service's own."""
    return max(limits.stream_interval, sampling.stream_interval)


def _complete_draw(
    complete: sampling_pb2.SamplingParams,
    sampling: sampling_pb2.SamplingParams,
    defaults: GenerationDefaults,
    vocab_size: int,
) -> None:
    temperature = _chosen(sampling, "temperature", sampling.temperature, defaults.temperature, 1.0)
    # A greedy request ignores the other parameters and defaults.
    if temperature < _GREEDY_TEMPERATURE:
        complete.temperature, complete.top_p, complete.top_k, complete.min_p = 0.0, 1.0, 0, 0.0
        return
    complete.temperature = max(_MIN_TEMPERATURE, temperature)
    complete.top_p = _chosen(sampling, "top_p", sampling.top_p, defaults.top_p, 1.0)
    complete.min_p = _chosen(sampling, "min_p", sampling.min_p, defaults.min_p, 0.0)
    top_k = int(_chosen(sampling, "top_k", sampling.top_k, defaults.top_k, 0))
    # 0 means all tokens, as do -1 and values above the vocabulary size.
    complete.top_k = top_k if 0 < top_k < vocab_size else 0


def _max_tokens(
    sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults, max_new_tokens: int
) -> int:
    if sampling.HasField("max_tokens"):
        return sampling.max_tokens
    default = max_new_tokens if defaults.max_new_tokens is None else defaults.max_new_tokens
    # The model's default must not end a request before its own min_tokens.
    return min(max_new_tokens, max(default, sampling.min_tokens))


def _check_numbers(
    sampling: sampling_pb2.SamplingParams, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, value: float, is_fine: bool, rule: str) -> None:
        if sampling.HasField(name):
            violations.need(is_fine and math.isfinite(value), f"sampling.{name}", _plain(value), rule)

    top, penalty = limits.max_temperature, limits.max_penalty
    within = f"must be in -{penalty:g}..{penalty:g}"
    temperature, min_p, repetition = sampling.temperature, sampling.min_p, sampling.repetition_penalty
    check("temperature", temperature, 0 <= temperature <= top, f"must be finite and in 0..{top:g}")
    check("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "must be above 0 and at most 1")
    check("top_k", sampling.top_k, sampling.top_k >= -1, "must be -1, 0 (both: all tokens) or more")
    check("min_p", min_p, 0 <= min_p <= 1, "must be in 0..1")
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    check("presence_penalty", presence, abs(presence) <= penalty, within)
    check("frequency_penalty", frequency, abs(frequency) <= penalty, within)
    least, most = limits.min_repetition_penalty, limits.max_repetition_penalty
    check("repetition_penalty", repetition, least <= repetition <= most, f"must be in {least:g}..{most:g}")


def _check_counts(
    sampling: sampling_pb2.SamplingParams, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, value: int, is_fine: bool, rule: str) -> None:
        if sampling.HasField(name):
            violations.need(is_fine, f"sampling.{name}", value, rule)

    most, least = sampling.max_tokens, sampling.min_tokens
    check("max_tokens", most, most >= 1, "must be at least 1")
    check("min_tokens", least, least >= 0, "must be at least 0")
    if sampling.HasField("max_tokens") and most >= 1:
        check("min_tokens", least, least <= most, f"must be at most max_tokens, {most}")
    asked, interval = sampling.stream_interval, limits.max_stream_interval
    check("stream_interval", asked, 1 <= asked <= interval, f"must be in 1..{interval}")
    budget = sampling.thinking_token_budget
    check("thinking_token_budget", budget, budget >= -1, "must be -1 (no budget), 0 or more")
    kinds = sampling_pb2.OutputKind.values()
    violations.need(
        sampling.output_kind in kinds, "sampling.output_kind", sampling.output_kind, f"must be one of {kinds}"
    )


def _check_group(
    sampling: sampling_pb2.SamplingParams,
    defaults: GenerationDefaults,
    limits: RequestLimits,
    violations: Violations,
) -> None:
    if not sampling.HasField("n"):
        return
    violations.need(
        1 <= sampling.n <= limits.max_n, "sampling.n", sampling.n, f"must be in 1..{limits.max_n}"
    )
    temperature = _chosen(sampling, "temperature", sampling.temperature, defaults.temperature, 1.0)
    if sampling.n > 1 and 0 <= temperature < _GREEDY_TEMPERATURE:
        rule = f"must be 1 where temperature is {_plain(temperature):g}: greedy outputs are all the same"
        violations.add("sampling.n", sampling.n, rule)


def _check_logprobs(
    sampling: sampling_pb2.SamplingParams, vocab_size: int, limits: RequestLimits, violations: Violations
) -> None:
    is_open = limits.max_logprobs == -1
    least, most = (-1, vocab_size) if is_open else (0, limits.max_logprobs)
    rule = f"must be in {least}..{most}" + (" (-1: the vocabulary)" if is_open else "")
    for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if sampling.HasField(name):
            violations.need(least <= value <= most, f"sampling.{name}", value, rule)


def _check_texts(
    sampling: sampling_pb2.SamplingParams, limits: RequestLimits, violations: Violations
) -> None:
    for field, texts, unit, most, most_chars in (
        ("sampling.stop", sampling.stop, "strings", limits.max_stop_strings, limits.max_stop_string_chars),
        ("sampling.bad_words", sampling.bad_words, "words", limits.max_bad_words, limits.max_bad_word_chars),
    ):
        violations.need_count(field, len(texts), unit, 0, most)
        for index, text in enumerate(texts[:most]):
            violations.need_count(field, len(text), "characters", 1, most_chars, index=index)
    if sampling.stop and sampling.HasField("detokenize") and not sampling.detokenize:
        violations.add("sampling.detokenize", False, "must be true where stop strings are given")


def _check_repetition(
    detection: sampling_pb2.RepetitionDetection, limits: RequestLimits, violations: Violations
) -> None:
    def check(name: str, value: int, least: int, most: int) -> None:
        field = f"sampling.repetition_detection.{name}"
        violations.need(least <= value <= most, field, value, f"must be in {least}..{most}")

    longest = detection.max_pattern_size
    check("max_pattern_size", longest, 0, limits.max_pattern_size)
    check("min_pattern_size", detection.min_pattern_size, 0, max(0, min(longest, limits.max_pattern_size)))
    # Without max_pattern_size, detection is off and min_count has no effect.
    if longest:
        check("min_count", detection.min_count, 2, limits.max_pattern_count)


def _check_bias(
    sampling: sampling_pb2.SamplingParams, vocab_size: int, limits: RequestLimits, violations: Violations
) -> None:
    field, most, bound = "sampling.logit_bias", limits.max_logit_bias, limits.max_abs_logit_bias
    if not violations.need_count(field, len(sampling.logit_bias), "entries", 0, most):
        return
    for index, entry in enumerate(sampling.logit_bias):
        is_fine = math.isfinite(entry.bias) and abs(entry.bias) <= bound
        violations.need(is_fine, field, _plain(entry.bias), f"must be in -{bound:g}..{bound:g}", index=index)
    check_token_ids(field, [entry.token_id for entry in sampling.logit_bias], vocab_size, violations)


def _chosen(
    sampling: sampling_pb2.SamplingParams, name: str, value: float, default: float | None, plain: float
) -> float:
    if sampling.HasField(name):
        return value
    return plain if default is None else default


def _plain(value: float) -> float:
    # A proto float has seven significant digits; more would show digits the client did not send.
    return value if isinstance(value, int) else float(f"{value:.7g}")
