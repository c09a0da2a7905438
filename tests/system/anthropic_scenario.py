"""What users of the `anthropic` package do, against a server: run in an environment with that package alone.

    python anthropic_scenario.py http://127.0.0.1:8000

Prints a JSON object: what each step saw. An assertion that fails ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

import anthropic
from openai_scenario_requests import MESSAGE

MESSAGES = [{"role": "user", "content": MESSAGE}]
MODEL = "triptych-tiny"
LENGTH = 24
GREEDY = {"model": MODEL, "messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "find_tower",
    "description": "Find a tower by its city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Pisa"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLING = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}


def run(client: anthropic.Anthropic) -> dict[str, object]:
    whole = client.messages.create(**GREEDY, system="You are brief.")
    with client.messages.stream(**GREEDY, system="You are brief.") as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", LENGTH)
    kinds = [event.type for event in client.messages.create(**GREEDY, stream=True)]
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="You are brief.")
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    stopped = client.messages.create(**GREEDY, stop_sequences=[text[3:6]])
    return {
        "text": client.messages.create(**GREEDY).content[0].text,
        "kinds": [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]],
        "stopped": [stopped.stop_reason, stopped.stop_sequence is not None],
        "calls": calls_of(client),
        "errors": [error_of(client, **wrong) for wrong in ({"model": "other"}, {"max_tokens": 0})],
    }


def calls_of(client: anthropic.Anthropic) -> list[object]:
    """Inputs of demanded calls, whole and streamed; the result of one is sent back."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**CALLING, tool_choice=choice)
    with client.messages.stream(**CALLING, tool_choice={"type": "tool", "name": TOOL["name"]}) as stream:
        streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    (call,) = whole.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "330 metres"}
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**CALLING, "messages": MESSAGES + turns, "max_tokens": LENGTH})
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > LENGTH
    return [call.input, streamed.content[-1].input]


def error_of(client: anthropic.Anthropic, **wrong: object) -> str:
    try:
        client.messages.create(**{**GREEDY, **wrong})
    except anthropic.APIStatusError as error:
        has_id = "with an id" if error.request_id else "without an id"
        return f"{type(error).__name__} {error.body['error']['type']} {has_id}"
    return "none"


async def text_of(client: anthropic.AsyncAnthropic) -> str:
    async with client.messages.stream(**GREEDY) as stream:
        return "".join([text async for text in stream.text_stream])


async def run_at_once(base: str) -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
        return await asyncio.gather(*(text_of(client) for _ in range(4)))


if __name__ == "__main__":
    (address,) = sys.argv[1:]
    seen = run(anthropic.Anthropic(base_url=address, api_key="none"))
    print(json.dumps({**seen, "texts": asyncio.run(run_at_once(address))}))
