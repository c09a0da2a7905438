"""What users of `openai[realtime]` do, against a server: run in an environment that has only that package.

    python realtime_scenario.py http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 KEY

The second server is one that needs the key.

Prints a JSON object: what each step saw. An assertion that fails ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import websockets
from openai.types.realtime import RealtimeServerEvent

WORKS = [
    "two turns of text, of which each event is of its type, and its usage",
    "a response that is cancelled; a call of a function, and its answer",
    "the asynchronous client; a client without its key",
]
TOOL = {
    "type": "function",
    "name": "find_tower",
    "description": "Find a tower by its city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Pisa"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SAMPLED = {"seed": 7, "temperature": 0}
# The package does not check what it receives.
EVENT = pydantic.TypeAdapter(RealtimeServerEvent)


def item_of(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def events_of(connection: Any) -> Iterator[Any]:
    """Events up to the end of a response."""
    for event in connection:
        EVENT.validate_python(event.to_dict())
        yield event
        if event.type == "error":
            raise AssertionError(event)
        if event.type == "response.done":
            return


def run(client: openai.OpenAI) -> dict[str, object]:
    model = client.models.list().data[0].id
    with client.realtime.connect(model=model) as connection:
        created = connection.recv()
        assert (created.type, created.session.model) == ("session.created", model)
        session = {
            "type": "realtime",
            "instructions": "Tell a story",
            "output_modalities": ["text"],
            "max_output_tokens": 12,
            **SAMPLED,
        }
        connection.session.update(session=session)
        updated = connection.recv()
        assert (updated.type, updated.session.instructions) == ("session.updated", "Tell a story")
        turns, usages = [], []
        for text in ("Once upon a time", "And then?"):
            connection.conversation.item.create(item=item_of(text))
            connection.response.create()
            events = list(events_of(connection))
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            response = events[-1].response
            assert response.output[0].content[0].text == said
            assert (response.status, response.status_details.reason) == ("incomplete", "max_output_tokens")
            turns.append(said)
            usages.append(response.usage)
        assert [usage.output_tokens for usage in usages] == [12, 12]
        assert usages[1].input_tokens > usages[0].total_tokens
        connection.response.create(response={"max_output_tokens": 400, "ignore_eos": True})
        statuses: list[str] = []
        for event in events_of(connection):
            if event.type == "response.output_text.delta" and not statuses:
                connection.response.cancel()
                statuses.append("in_progress")
        statuses.append(event.response.status)
        demanded = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        connection.response.create(response={**demanded, "max_output_tokens": 200})
        events = list(events_of(connection))
        (call,) = [item for item in events[-1].response.output if item.type == "function_call"]
        arguments = "".join(
            event.delta for event in events if event.type == "response.function_call_arguments.delta"
        )
        assert arguments == call.arguments
        answered = {"type": "function_call_output", "call_id": call.call_id, "output": "It is tall"}
        connection.conversation.item.create(item=answered)
        # How much of the cancelled response it continues, and so where it would end by itself, varies.
        connection.response.create(response={"ignore_eos": True})
        statuses.append(list(events_of(connection))[-1].response.status)
        connection.input_audio_buffer.clear()
        error = connection.recv().error
    return {
        "turns": turns,
        "statuses": statuses,
        "call": json.loads(call.arguments),
        "error": [error.type, error.code, error.param],
    }


async def run_async(client: openai.AsyncOpenAI) -> str:
    async with client.realtime.connect(model="") as connection:
        await connection.conversation.item.create(item=item_of("Once upon a time"))
        await connection.response.create(
            response={"instructions": "Tell a story", "max_output_tokens": 12, **SAMPLED}
        )
        said = ""
        async for event in connection:
            if event.type == "response.output_text.delta":
                said += event.delta
            elif event.type == "response.done":
                return said
    raise AssertionError("the connection ended before the response")


def status_with(base: str, key: str) -> int:
    """The status that answers the request for a WebSocket with a key."""
    try:
        with openai.OpenAI(base_url=base, api_key=key).realtime.connect(model="") as connection:
            assert connection.recv().type == "session.created"
            return 101
    except websockets.exceptions.InvalidStatus as error:
        return error.response.status_code


def main(base: str, guarded_base: str, key: str) -> None:
    seen = run(openai.OpenAI(base_url=base, api_key="none"))
    seen["async"] = asyncio.run(run_async(openai.AsyncOpenAI(base_url=base, api_key="none")))
    seen["by_key"] = [status_with(guarded_base, one) for one in (key, "none-of-them-0123456789")]
    print(json.dumps(seen))


main(*sys.argv[1:])
