"""Twelve steps with the Python client: `python twelve_steps.py HOST:PORT`. Knows the public API only."""

from __future__ import annotations

import sys
import time

from triptych_client.client import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished, Started

PROMPT = "Once upon a time"


class Surprise(Exception):
    """The server's behaviour differs from what this example expects."""


def expect(condition: bool, what: str) -> None:
    """Fail unless `condition` is true."""
    if not condition:
        raise Surprise(what)


def say(step: int, name: str, text: object) -> None:
    """Print the line of one step."""
    print(f"{step:2} {name:<10} {text}")


def look_around(client: Client) -> None:
    """Steps 2 to 4: health, models, server."""
    expect(client.is_ready(), "the frontend is not ready")
    say(2, "health", "SERVING")

    models = client.list_models()
    expect(len(models) > 0 and models[0].max_model_len > 0, f"no model: {models}")
    say(3, "models", ", ".join(f"{model.name} (up to {model.max_model_len} tokens)" for model in models))

    info = client.server_info()
    expect(bool(info.version), "the server returns no version")
    say(4, "server", f"version {info.version}, {len(info.engines)} engine(s)")


def tokens_and_back(client: Client) -> None:
    """Steps 5 and 6: tokenize, detokenize."""
    token_ids = client.tokenize(PROMPT, add_special_tokens=False)
    expect(len(token_ids) > 0, "no tokens")
    say(5, "tokenize", token_ids)

    text = client.detokenize(token_ids)
    expect(text.strip() == PROMPT, f"another text: {text!r}")
    say(6, "detokenize", repr(text))


def whole_and_streamed(client: Client) -> str:
    """Steps 7 and 8: one answer, complete and streamed. Returns its text."""
    completion = client.generate_unary(PROMPT, temperature=0, max_tokens=24)
    output = completion.outputs[0]
    expect(output.reason in ("stop", "length"), f"finish reason {output.reason}")
    expect(completion.usage.num_completion_tokens == len(output.token_ids), f"usage {completion.usage}")
    expect(len(completion.text) >= 6, f"too short a text to go on with: {completion.text!r}")
    say(7, "unary", repr(completion.text))

    events = list(client.generate(PROMPT, temperature=0, max_tokens=24))
    expect(isinstance(events[0], Started), f"first event {events[0]}")
    expect(isinstance(events[-1], Finished), f"last event {events[-1]}")
    deltas = [event for event in events if isinstance(event, Delta)]
    expect(len(deltas) == len(events) - 2, f"events {events}")
    expect("".join(delta.text for delta in deltas) == completion.text, "another text than step 7")
    say(8, "stream", f"the same text in {len(deltas)} deltas")
    return completion.text


def same_seed(client: Client) -> None:
    """Step 9: sampling twice with one seed."""
    texts = [client.generate_unary(PROMPT, temperature=1, seed=7, max_tokens=16).text for _ in range(2)]
    expect(texts[0] == texts[1], f"two texts of one seed: {texts}")
    say(9, "seed", repr(texts[0]))


def stop_string(client: Client, text: str) -> None:
    """Step 10: a stop string taken from the known answer."""
    stop = text[len(text) // 2 :][:3]
    completion = client.generate_unary(PROMPT, temperature=0, max_tokens=24, stop=[stop])
    output = completion.outputs[0]
    expect((output.reason, output.stop_match) == ("stop", stop), f"{output.reason} on {output.stop_match!r}")
    expect(completion.text == text[: text.index(stop)], f"text {completion.text!r}")
    say(10, "stop", f"{stop!r} leaves {completion.text!r}")


def cancel(client: Client) -> None:
    """Step 11: close a stream early; soon after, the frontend has no request in flight."""
    with client.generate(PROMPT, ignore_eos=True) as stream:
        for event in stream:
            expect(not isinstance(event, Finished), "ended before it was cancelled")
            if isinstance(event, Delta):
                break
    give_up_at = time.monotonic() + 5
    while any(engine.num_in_flight for engine in client.server_info().engines):
        expect(time.monotonic() < give_up_at, "still in flight after 5 s")
        time.sleep(0.02)
    say(11, "cancel", "nothing in flight")


def refusal(client: Client) -> None:
    """Step 12: an invalid temperature, which the server refuses."""
    try:
        client.generate_unary(PROMPT, temperature=99)
    except TriptychError as error:
        expect(error.status.name == "INVALID_ARGUMENT", str(error))
        violations = error.field_violations
        expect(any("temperature" in violation.field for violation in violations), f"violations {violations}")
        say(12, "refusal", "; ".join(f"{each.field}: {each.description}" for each in violations))
    else:
        raise Surprise("a temperature of 99 was taken")


def main(arguments: list[str]) -> int:
    """Run all steps against the address in `arguments`."""
    target = arguments[0] if arguments else "127.0.0.1:50051"
    try:
        with Client(target) as client:
            client.connect(timeout_s=10)
            say(1, "connect", target)
            look_around(client)
            tokens_and_back(client)
            text = whole_and_streamed(client)
            same_seed(client)
            stop_string(client, text)
            cancel(client)
            refusal(client)
    except (Surprise, TriptychError) as error:
        print(f"surprise: {error}", file=sys.stderr)
        return 1
    print("OK: twelve steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
