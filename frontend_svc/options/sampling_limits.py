"""How tokens are drawn and what ends an output: the parameters that every request has, given or not."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import GenerationDefaults, ServedModel
from frontend_svc.text.prompt import too_long
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.rules import rules_of

# A temperature below the first is greedy; dividing logits by one below the second could overflow.
_GREEDY_TEMPERATURE = 1e-5
_MIN_TEMPERATURE = rules_of(sampling_pb2.SamplingParams, "temperature").raised_to


class SamplingLimits(RequestOption):
    fields = (
        "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.seed",
        "sampling.max_tokens", "sampling.min_tokens", "sampling.n", "sampling.stop",
        "sampling.stop_token_ids", "sampling.ignore_eos", "sampling.include_stop_in_output",
        "sampling.skip_special_tokens", "sampling.spaces_between_special_tokens", "sampling.detokenize",
        "sampling.output_kind", "sampling.stream_interval", "sampling.repetition_detection",
        "sampling.skip_reading_prefix_cache",
    )  # fmt: skip

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        _check_counts(request.sampling, violations)
        _check_group(request.sampling, model.defaults, violations)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        """Check that prompt and output fit the model, and fill in the defaults.

        What concerns text alone is not sent. The engine knows the model's end-of-sequence ids and stops at
        each.
        """
        sampling, complete, defaults = request.sampling, entry.sampling, prompt.model.defaults
        _check_fit(sampling, prompt)
        max_new_tokens = prompt.model.max_model_len - len(prompt.token_ids)
        complete.max_tokens = _max_tokens(sampling, defaults, max_new_tokens)
        complete.min_tokens = sampling.min_tokens
        complete.ignore_eos = sampling.ignore_eos
        complete.stop_token_ids.extend(dict.fromkeys(sampling.stop_token_ids))
        _complete_draw(complete, sampling, prompt.model)
        detection = sampling.repetition_detection
        if detection.max_pattern_size:
            complete.repetition_detection.CopyFrom(detection)
            complete.repetition_detection.min_pattern_size = max(1, detection.min_pattern_size)
        if sampling.HasField("skip_reading_prefix_cache"):
            entry.skip_reading_prefix_cache = sampling.skip_reading_prefix_cache
            prompt.is_computed_whole = sampling.skip_reading_prefix_cache


def _check_fit(sampling: sampling_pb2.SamplingParams, prompt: PreparedPrompt) -> None:
    """Raise InvalidArgument for an empty prompt, and for lengths that are too large for the model."""
    num_prompt_tokens, max_model_len = len(prompt.token_ids), prompt.model.max_model_len
    if num_prompt_tokens == 0:
        raise InvalidArgument(
            f"{prompt.field_name} has no tokens, it must have at least 1",
            reason="INVALID_REQUEST",
            field=prompt.field_name,
        )
    if num_prompt_tokens >= max_model_len:
        raise too_long(prompt.field_name, str(num_prompt_tokens), num_prompt_tokens, max_model_len)
    too_many = Violations()
    num_free = max_model_len - num_prompt_tokens
    rule = f"but {num_prompt_tokens} prompt tokens leave only {num_free} of {max_model_len}"
    lengths = {"max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens}
    for name, value in lengths.items():
        too_many.need(value <= num_free, f"sampling.{name}", value, rule)
    too_many.raise_if_any(
        "CONTEXT_LENGTH_EXCEEDED",
        {
            "num_tokens": str(num_prompt_tokens + max(lengths.values())),
            "max_model_len": str(max_model_len),
        },
    )


def _max_tokens(
    sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults, max_new_tokens: int
) -> int:
    if sampling.HasField("max_tokens"):
        return sampling.max_tokens
    default = max_new_tokens if defaults.max_new_tokens is None else defaults.max_new_tokens
    # The model's default must not end a request before its own min_tokens.
    return min(max_new_tokens, max(default, sampling.min_tokens))


def _complete_draw(
    complete: sampling_pb2.SamplingParams, sampling: sampling_pb2.SamplingParams, model: ServedModel
) -> None:
    chosen = model.defaults.chosen
    temperature = chosen(sampling, "temperature", 1.0)
    # A greedy request ignores the other parameters and defaults.
    if temperature < _GREEDY_TEMPERATURE:
        complete.temperature, complete.top_p, complete.top_k, complete.min_p = 0.0, 1.0, 0, 0.0
        return
    complete.temperature = max(_MIN_TEMPERATURE, temperature)
    complete.top_p = chosen(sampling, "top_p", 1.0)
    complete.min_p = chosen(sampling, "min_p", 0.0)
    top_k = int(chosen(sampling, "top_k", 0))
    # 0 means all tokens, as do -1 and values above the vocabulary size.
    complete.top_k = top_k if 0 < top_k < model.vocab_size else 0


def _check_counts(sampling: sampling_pb2.SamplingParams, violations: Violations) -> None:
    max_tokens, min_tokens = sampling.max_tokens, sampling.min_tokens
    if max_tokens >= 1:
        rule = f"must be at most {max_tokens}, the limit of the output"
        violations.need(min_tokens <= max_tokens, "sampling.min_tokens", min_tokens, rule)
    if sampling.stop and sampling.HasField("detokenize") and not sampling.detokenize:
        violations.add("sampling.detokenize", False, "must be true where stop strings are given")
    detection = sampling.repetition_detection
    longest, shortest = detection.max_pattern_size, detection.min_pattern_size
    field, rule = "sampling.repetition_detection.min_pattern_size", f"must be in 0..{max(0, longest)}"
    violations.need(shortest <= max(0, longest), field, shortest, rule)


def _check_group(
    sampling: sampling_pb2.SamplingParams, defaults: GenerationDefaults, violations: Violations
) -> None:
    temperature = defaults.chosen(sampling, "temperature", 1.0)
    if sampling.n > 1 and 0 <= temperature < _GREEDY_TEMPERATURE:
        rule = f"must be 1 where temperature is {temperature:g}: greedy outputs are all the same"
        violations.add("sampling.n", sampling.n, rule)
