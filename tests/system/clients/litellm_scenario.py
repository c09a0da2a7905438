# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm."""

from __future__ import annotations

import asyncio
import json
import os

from steps import LONG, MODEL, PROMPT, STORY, find_tower, run
from tower import Tower

# Its table of prices otherwise comes from the network, with three attempts.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Pisa"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {
    "type": "function",
    "function": {"name": "find_tower", "description": "Find a tower", "parameters": SCHEMA},
}
TOOL = {"name": "find_tower", "description": "Find a tower", "input_schema": SCHEMA}


def options(base: str, provider: str) -> dict[str, object]:
    return {
        "model": f"{provider}/{MODEL}",
        "messages": MESSAGES,
        "max_tokens": LONG,
        "temperature": 0,
        "api_base": base,
        "api_key": "none",
    }


def check_calls(base: str, provider: str) -> None:
    answer = litellm.completion(
        **options(base, provider), tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False
    )
    (choice,) = answer.choices
    # `hosted_vllm/` leaves `additionalProperties` out: further arguments are in the schema, up to the limit.
    if provider == "openai" or choice.finish_reason != "length":
        (call,) = choice.message.tool_calls
        find_tower(json.loads(call.function.arguments)["city"])


def calls(base: str) -> None:
    """`openai/` and `hosted_vllm/`: a demanded call"""
    for provider in ("openai", "hosted_vllm"):
        check_calls(base, provider)


def typed(base: str) -> None:
    """`openai/`: `response_format` of a model"""
    answer = litellm.completion(**options(base, "openai"), response_format=Tower)
    Tower.model_validate_json(answer.choices[0].message.content)


def responses(base: str) -> None:
    """`responses`"""
    answer = litellm.responses(
        model=f"openai/{MODEL}", input=PROMPT, max_output_tokens=40, api_base=base, api_key="none"
    )
    assert answer.output[0].content[0].text


async def check_message(**options: object) -> None:
    """Check that a message is a call of the named tool."""
    choice = {"type": "tool", "name": "find_tower", "disable_parallel_tool_use": True}
    answer = await litellm.anthropic.messages.acreate(
        **options, messages=MESSAGES, max_tokens=LONG, api_key="none", tools=[TOOL], tool_choice=choice
    )
    (block,) = answer["content"]
    assert block["type"] == answer["stop_reason"] == "tool_use"
    find_tower(**block["input"])


async def streamed_text(**options: object) -> str:
    messages = [{"role": "user", "content": STORY}]
    stream = await litellm.anthropic.messages.acreate(
        **options, messages=messages, max_tokens=60, temperature=0, api_key="none", stream=True
    )
    lines = b"".join([event async for event in stream]).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-1]["type"] == "message_stop"
    return "".join(event.get("delta", {}).get("text", "") for event in events)


def bridge(base: str) -> None:
    """Anthropic messages over `openai/` (a call) and `hosted_vllm/` (a stream)"""
    asyncio.run(check_message(model=f"openai/{MODEL}", api_base=base))
    text = asyncio.run(streamed_text(model=f"hosted_vllm/{MODEL}", api_base=base))
    assert len(set(text.split())) >= 20, text


def anthropic(base: str) -> None:
    """`anthropic/`: messages, `completion` and its stream"""
    address = base.removesuffix("/v1")
    asyncio.run(check_message(model=f"anthropic/{MODEL}", api_base=address))
    demanded = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**options(address, "anthropic"), **demanded)
    chunks = list(litellm.completion(**options(address, "anthropic"), **demanded, stream=True))
    for one in (answer, litellm.stream_chunk_builder(chunks)):
        (choice,) = one.choices
        (call,) = choice.message.tool_calls
        find_tower(**json.loads(call.function.arguments))
        assert choice.finish_reason == "tool_calls"


run(calls, typed, responses, bridge, anthropic)
