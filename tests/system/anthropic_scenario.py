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

WORKS = [
    "messages: whole and streamed, several at once",
    "demanded calls, whole and streamed, and their results",
    "`count_tokens`, models, stop sequences, errors",
]
MESSAGES = [{"role": "user", "content": MESSAGE}]
LENGTH = 24
GREEDY = {"messages": MESSAGES, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
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
CALLING = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}


def run(client: anthropic.Anthropic, model: str) -> dict[str, object]:
    greedy = {**GREEDY, "model": model}
    brief = {**greedy, "system": "You are brief."}
    whole = client.messages.create(**brief)
    with client.messages.stream(**brief) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", LENGTH)
    kinds = [event.type for event in client.messages.create(**greedy, stream=True)]
    counted = client.messages.count_tokens(model=model, messages=MESSAGES, system="You are brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    greedy_text = client.messages.create(**greedy).content[0].text
    stopped = client.messages.create(**greedy, stop_sequences=[greedy_text[3:6]])
    assert greedy_text.startswith(stopped.content[0].text)
    return {
        "text": greedy_text,
        "kinds": [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]],
        "stopped": [stopped.stop_reason, stopped.stop_sequence == greedy_text[3:6]],
        "calls": calls_of(client, {**CALLING, "model": model}),
        "errors": [
            error_of(client, {**greedy, **wrong}) for wrong in ({"model": "other"}, {"max_tokens": 0})
        ],
    }


def calls_of(client: anthropic.Anthropic, calling: dict[str, object]) -> list[object]:
    """Inputs of demanded calls, whole and streamed; the result of one is sent back."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**calling, tool_choice=choice)
    with client.messages.stream(**calling, tool_choice={"type": "tool", "name": TOOL["name"]}) as stream:
        streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    (call,) = whole.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "330 metres"}
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**calling, "messages": MESSAGES + turns, "max_tokens": LENGTH})
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > LENGTH
    return [call.input, streamed.content[-1].input]


def error_of(client: anthropic.Anthropic, wrong: dict[str, object]) -> str:
    try:
        client.messages.create(**wrong)
    except anthropic.APIStatusError as error:
        has_id = "with an id" if error.request_id else "without an id"
        return f"{type(error).__name__} {error.body['error']['type']} {has_id}"
    return "none"


async def text_of(client: anthropic.AsyncAnthropic, model: str, temperature: float) -> str:
    options = {**GREEDY, "model": model, "extra_body": {"temperature": temperature}}
    async with client.messages.stream(**options) as stream:
        return "".join([text async for text in stream.text_stream])


async def run_at_once(base: str, model: str) -> list[str]:
    """Four greedy texts and four that are drawn."""
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
        return await asyncio.gather(*(text_of(client, model, at // 4) for at in range(8)))


if __name__ == "__main__":
    (address,) = sys.argv[1:]
    with anthropic.Anthropic(base_url=address, api_key="none") as made:
        served, _ = [model.id for model in made.models.list() if model.display_name]
        seen = run(made, served)
    print(json.dumps({**seen, "texts": asyncio.run(run_at_once(address, served))}))
