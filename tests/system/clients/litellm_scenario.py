# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm."""

from __future__ import annotations

import json
import os

from steps import LONG, MODEL, PROMPT, Tower, find_tower, run

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


def options(base: str, provider: str) -> dict[str, object]:
    return {
        "model": f"{provider}/{MODEL}",
        "messages": MESSAGES,
        "max_tokens": LONG,
        "seed": 1,
        "api_base": base,
        "api_key": "none",
    }


def check_calls(base: str, provider: str) -> None:
    function = {"name": "find_tower", "description": "Find a tower", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    answer = litellm.completion(
        **options(base, provider), tools=tools, tool_choice="required", parallel_tool_calls=False
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


run(calls, typed, responses)
