"""What users of the `openai` package do, against a server: run in an environment that has only that package.

    python openai_scenario.py http://127.0.0.1:8000/v1

Prints a JSON object: what each step saw. An assertion that fails ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

import openai
import pydantic
from openai_scenario_requests import MESSAGE, PROMPT, SAMPLED

MESSAGES = [{"role": "user", "content": MESSAGE}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_tower",
            "description": "Find a tower by its city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Pisa"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class Tower(pydantic.BaseModel):
    city: str
    is_tall: bool


def run(client: openai.OpenAI) -> dict[str, object]:
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    ids = {"return_token_ids": True}
    whole = client.completions.create(model=model, prompt=PROMPT, extra_body=ids, **SAMPLED)
    parts = client.completions.create(model=model, prompt=PROMPT, stream=True, extra_body=ids, **SAMPLED)
    chunks = list(parts)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=ids, **SAMPLED
    )
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SAMPLED
    )
    *deltas, last = list(stream)
    text = "".join(delta.choices[0].delta.content or "" for delta in deltas)
    assert text == chat.choices[0].message.content
    assert last.usage == chat.usage
    assert all(len(token.top_logprobs) == 2 for token in chat.choices[0].logprobs.content)
    several = client.chat.completions.create(model=model, messages=MESSAGES, n=3, **SAMPLED)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) == 3
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Tower, seed=1, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Tower)
    called = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        seed=2,
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Pisa")
    assert called.choices[0].finish_reason == "tool_calls"
    return {
        "completion": whole.choices[0].token_ids,
        "chunks": [
            token for chunk in chunks for each in chunk.choices for token in getattr(each, "token_ids", ())
        ],
        "chat": chat.choices[0].token_ids,
        "text": text,
        "errors": errors(client, model),
    }


def errors(client: openai.OpenAI, model: str) -> list[str]:
    seen = []
    for arguments in ({"model": "other"}, {"temperature": 9.0}, {"max_tokens": -1}):
        try:
            client.chat.completions.create(**{"model": model, "messages": MESSAGES, **arguments})
        except openai.APIStatusError as error:
            seen.append(f"{type(error).__name__} {error.param}")
    return seen


async def run_async(base_url: str) -> list[str]:
    """Chats side by side, each as a stream."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def chat(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=model, messages=MESSAGES, stream=True, **{**SAMPLED, "seed": seed}
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return list(await asyncio.gather(*map(chat, range(7, 15))))


if __name__ == "__main__":
    base = sys.argv[1]
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as made:
        seen = run(made)
    print(json.dumps(seen | {"texts": asyncio.run(run_async(base))}))
