"""The verb `complete`: one request to a running server, its answer as text or JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.verbs.generation import Generation, event_record
from service_kit.channel import open_channel
from service_kit.errors import InvalidArgument, ServiceError
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2

# Fields that take ids in the format of --prompt-token-ids.
_ID_LISTS = frozenset({"stop_token_ids", "allowed_token_ids"})

SamplingValue = int | float | bool | list[str] | list[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """Options of a completion. `sampling` has the API's field names; None is unset."""

    url: str
    prompt: str | None
    prompt_token_ids: str | None
    model: str
    request_id: str
    sampling: Mapping[str, SamplingValue | None]
    as_json: bool
    stream: bool
    timeout_s: float | None


def run_complete(completion: Completion) -> int:
    """Send the request and print the answer. Returns 0, or 1 with the error on stderr."""
    return run_verb(_complete(completion))


def run_verb(work: Coroutine[None, None, int]) -> int:
    """Run `work`; returns its exit code, or 1 with the error on stderr."""
    try:
        return asyncio.run(work)
    except ServiceError as error:
        print_failure(error)
        return 1


def request_of(completion: Completion) -> generate_pb2.GenerateRequest:
    """The request; raises InvalidArgument for values that a message cannot hold."""
    request = generate_pb2.GenerateRequest(
        model=completion.model,
        request_id=completion.request_id,
        sampling=sampling_of(completion.sampling),
        return_prompt_token_ids=completion.as_json,
    )
    if (completion.prompt is None) == (completion.prompt_token_ids is None):
        raise InvalidArgument("give either --prompt or --prompt-token-ids", field="input")
    if completion.prompt is not None:
        request.prompt = completion.prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids(completion.prompt_token_ids or "", field="token_ids.ids"))
    return request


def sampling_of(values: Mapping[str, SamplingValue | None]) -> sampling_pb2.SamplingParams:
    """Sampling parameters from values by field name."""
    sampling = sampling_pb2.SamplingParams()
    # The names come from the command line's options.
    one_field: Any = sampling_pb2.SamplingParams
    for name, value in values.items():
        if value is None:
            continue
        if name in _ID_LISTS and isinstance(value, list):
            value = _token_ids(",".join(map(str, value)), field=f"sampling.{name}")
        try:
            sampling.MergeFrom(one_field(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name} cannot be {value}: {error}", field=f"sampling.{name}") from error
    return sampling


def print_failure(error: ServiceError) -> None:
    """Print an error of a server or of the connection on stderr: status, reason, message, fields."""
    name = error.code.name
    status = name if error.reason == name else f"{name} ({error.reason})"
    print(f"{status}: {error.message}", file=sys.stderr)
    if isinstance(error, InvalidArgument):
        for field, description in error.violations:
            print(f"  {field}: {description}", file=sys.stderr)


async def _complete(completion: Completion) -> int:
    request = request_of(completion)
    async with open_channel(completion.url, profile="public") as channel:
        generation = Generation(channel, request)
        async for response in generation.events(completion.timeout_s):
            if not completion.as_json:
                # Several outputs arrive interleaved; the plain format shows only the first.
                if response.delta.output_index == 0:
                    print(response.delta.text, end="", flush=True)
            elif completion.stream:
                print(json.dumps(event_record(response, generation.answer.trace_id)), flush=True)
    if not completion.as_json:
        print()
    elif not completion.stream:
        print(json.dumps(asdict(generation.answer)))
    return 0


def _token_ids(text: str, *, field: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not a list of ids like 1,2,3", field=field) from error
    for token_id in ids:
        if not 0 <= token_id < 2**32:
            raise InvalidArgument(f"token id {token_id} is not in 0..4294967295", field=field)
    return ids
