"""From keyword arguments to a GenerateRequest. Checks names, not values: those are the server's to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2


class GenerateOptions(TypedDict, total=False):
    """What may be said about a request, under the names of the API's fields; what is left out is unset."""

    model: str
    request_id: str
    priority: int
    cache_salt: str
    session_id: str
    job_id: str
    is_last_step: bool
    adapter: str
    truncate_prompt_tokens: int
    add_special_tokens: bool
    return_prompt_token_ids: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    skip_special_tokens: bool
    detokenize: bool
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    stream_interval: int
    repetition_detection: sampling_pb2.RepetitionDetection
    structured_output: sampling_pb2.StructuredOutput


def build_generate_request(
    prompt: str | Sequence[int], options: GenerateOptions
) -> generate_pb2.GenerateRequest:
    """The request for a text or for token ids. A name that the API does not have is a TypeError."""
    request_fields: dict[str, object] = {}
    sampling_fields: dict[str, object] = {}
    for name, value in options.items():
        if name in generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name:
            request_fields[name] = value
        elif name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            sampling_fields[name] = [value] if name == "stop" and isinstance(value, str) else value
        else:
            raise TypeError(f"generate has no option {name!r}")
    if isinstance(prompt, str):
        request_fields["prompt"] = prompt
    else:
        request_fields["token_ids"] = generate_pb2.TokenIds(ids=prompt)
    if sampling_fields:
        # mypy sees one type for all of the unpacked values; protobuf checks each as it is set.
        request_fields["sampling"] = sampling_pb2.SamplingParams(**sampling_fields)  # type: ignore[arg-type]
    return generate_pb2.GenerateRequest(**request_fields)  # type: ignore[arg-type]
