"""Twelve steps with the Python client: `python twelve_steps.py HOST:PORT`. Knows the public API only."""

from __future__ import annotations

import sys
import threading
import time

import grpc

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_client.channel_options import ChannelOptions
from triptych_client.client import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Event, Finished, Started

PROMPT = "Once upon a time"
REQUEST_ID = "twelve-steps"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
MAX_WAIT_S = 60


class Surprise(Exception):
    """The server's behaviour differs from what this example expects."""


def expect(condition: bool, what: object) -> None:
    """Fail unless `condition` is true."""
    if not condition:
        raise Surprise(what)


def show(step: int, name: str, result: object) -> None:
    """Print the line of one step."""
    print(f"{step:2} {name:<12} {result}", flush=True)


def look_around(client: Client) -> None:
    """Steps 1 and 2: health, models."""
    expect(client.is_ready(), "the frontend is not ready")
    show(1, "health", "SERVING")

    models = client.list_models()
    expect(len(models) == 1, f"models {models}")
    show(2, "models", f"{models[0].name}, up to {models[0].max_model_len} tokens")


def unary(client: Client) -> str:
    """Step 3: one complete answer. Returns its text."""
    completion = client.generate_unary(PROMPT, temperature=0, max_tokens=24, ignore_eos=True)
    output = completion.outputs[0]
    expect(completion.usage.num_completion_tokens == len(output.token_ids), f"usage {completion.usage}")
    show(3, "unary", f"{len(output.token_ids)} tokens, finished by {output.reason}")
    return output.text


def joined(events: list[Event]) -> str:
    """The text of a stream: started, then deltas, then finished."""
    expect(isinstance(events[0], Started), f"first event {events[0]}")
    expect(isinstance(events[-1], Finished), f"last event {events[-1]}")
    deltas = [event for event in events if isinstance(event, Delta)]
    expect(len(deltas) == len(events) - 2, f"events {events}")
    return "".join(delta.text for delta in deltas)


def stream(client: Client, text: str) -> None:
    """Step 4: the same answer as a stream."""
    events = list(client.generate(PROMPT, temperature=0, max_tokens=24, ignore_eos=True))
    expect(joined(events) == text, f"another text than the unary answer: {joined(events)!r}")
    show(4, "stream", "the text of the unary answer")


def wait_until_idle(client: Client) -> None:
    """An abandoned request is aborted: soon, the frontend has none in flight."""
    give_up_at = time.monotonic() + 5
    while any(engine.num_in_flight for engine in client.server_info().engines):
        expect(time.monotonic() < give_up_at, "still in flight after 5 s")
        time.sleep(0.02)


def cancel(client: Client) -> None:
    """Step 5: close a stream early, one of 16 long outputs."""
    with client.generate(PROMPT, n=16, ignore_eos=True) as events:
        for event in events:
            expect(not isinstance(event, Finished), "ended before it was cancelled")
            if isinstance(event, Delta):
                break
    wait_until_idle(client)
    show(5, "cancel", "nothing in flight")


def deadline(client: Client) -> None:
    """Step 6: a call that takes longer than its deadline."""
    try:
        client.generate_unary(PROMPT, n=16, ignore_eos=True, timeout_s=0.2)
    except TriptychError as error:
        wait_until_idle(client)
        show(6, "deadline", f"{error.status.name}, nothing in flight")
    else:
        raise Surprise("32,000 tokens in 0.2 s")


def bad_model(client: Client) -> None:
    """Step 7: a model that is not served."""
    try:
        client.generate_unary(PROMPT, model="nope")
    except TriptychError as error:
        show(7, "bad model", error)
    else:
        raise Surprise("an unknown model has answered")


def bad_field(client: Client) -> None:
    """Step 8: an invalid temperature; the details of the status name the field."""
    try:
        client.generate_unary(PROMPT, temperature=99)
    except TriptychError as error:
        (violation,) = error.field_violations
        show(8, "bad field", f"{error.status.name} in {violation.field}: {violation.description}")
    else:
        raise Surprise("a temperature of 99 was accepted")


def big_prompt(client: Client) -> None:
    """Step 9: messages beyond gRPC's default limit of 4 MiB, in both directions."""
    try:
        client.generate_unary("x" * (5 << 20))
    except TriptychError as error:
        (violation,) = error.field_violations
        status = f"{error.status.name} in {violation.field}"
    else:
        raise Surprise("a prompt of 5 MiB fits the model")
    tokens = client.tokenize_with_offsets("x" * 500_000)
    expect(tokens[-1].name == "x", f"last token {tokens[-1]}")
    show(9, "big prompt", f"{status}; {len(tokens)} tokens with their names came back")


def two_streams(client: Client, text: str) -> None:
    """Step 10: two streams at the same time, over one connection."""
    streams = [client.generate(PROMPT, temperature=0, max_tokens=24, ignore_eos=True) for _ in range(2)]
    started = [next(events) for events in streams]
    for first, events in zip(started, streams, strict=True):
        expect(joined([first, *events]) == text, "another text than the unary answer")
    show(10, "two streams", "the text of the unary answer, twice")


def ids(client: Client) -> None:
    """Step 11: the ids of the call in the server's logs and traces, which are the client's own."""
    traceparent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    try:
        client.generate_unary(
            PROMPT, model="nope", metadata={"x-request-id": REQUEST_ID, "traceparent": traceparent}
        )
    except TriptychError as error:
        show(11, "ids", f"x-request-id {error.request_id}, x-trace-id {error.trace_id}")
    else:
        raise Surprise("an unknown model has answered")


def reconnect(target: str) -> None:
    """Step 12: stream until the server asks the channel to leave its connection, and then once more."""
    sampling = sampling_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
    request = generate_pb2.GenerateRequest(prompt=PROMPT, sampling=sampling)
    has_left = threading.Event()

    def watch(state: grpc.ChannelConnectivity) -> None:
        if state is not grpc.ChannelConnectivity.READY:
            has_left.set()

    def read_stream() -> None:
        *_, last = stub.Generate(request)
        expect(last.WhichOneof("event") == "finished", f"last event {last}")

    with grpc.insecure_channel(target, options=ChannelOptions().as_grpc()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        grpc.channel_ready_future(channel).result(timeout=10)
        channel.subscribe(watch)
        give_up_at = time.monotonic() + MAX_WAIT_S
        while not has_left.is_set():
            expect(time.monotonic() < give_up_at, f"no GOAWAY in {MAX_WAIT_S} s")
            read_stream()
        read_stream()
    show(12, "reconnect", "a stream outlived its connection, the next call took another")


def main(arguments: list[str]) -> int:
    """Run all steps against the address in `arguments`."""
    (target,) = arguments
    try:
        with Client(target) as client:
            client.connect(timeout_s=10)
            look_around(client)
            text = unary(client)
            stream(client, text)
            cancel(client)
            deadline(client)
            bad_model(client)
            bad_field(client)
            big_prompt(client)
            two_streams(client, text)
            ids(client)
        reconnect(target)
    except (Surprise, TriptychError, grpc.RpcError) as error:
        print(f"surprise: {error}", file=sys.stderr)
        return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
