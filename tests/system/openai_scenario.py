"""What users of the `openai` package do, against a server: run in an environment that has only that package.

    python openai_scenario.py http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1

The second server is one whose model embeds.

Prints a JSON object: what each step saw. An assertion that fails ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

import openai
import pydantic
from openai_scenario_requests import EMBEDDED, FOLLOWING, MESSAGE, PROMPT, SAMPLED

WORKS = [
    "completions, chat, responses: whole, streamed and asynchronous",
    "chat and responses: `parse` of a model, demanded calls",
    "embeddings, models, adapters, errors",
]
MESSAGES = [{"role": "user", "content": MESSAGE}]
FUNCTION = {
    "name": "find_tower",
    "description": "Find a tower by its city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Pisa"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]


class Tower(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    is_tall: bool


def run(client: openai.OpenAI) -> dict[str, object]:
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    extra = {"return_token_ids": True, "job_id": "openai"}
    whole = client.completions.create(model=model, prompt=PROMPT, extra_body=extra, **SAMPLED)
    parts = client.completions.create(model=model, prompt=PROMPT, stream=True, extra_body=extra, **SAMPLED)
    chunks = list(parts)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=extra, **SAMPLED
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


def run_responses(client: openai.OpenAI) -> dict[str, object]:
    model = client.models.list().data[0].id
    sampled = {
        "model": model,
        "temperature": SAMPLED["temperature"],
        "max_output_tokens": SAMPLED["max_tokens"],
        "extra_body": {
            "seed": SAMPLED["seed"],
            "return_token_ids": True,
            "job_id": "openai",
            "is_last_step": True,
        },
    }
    whole = client.responses.create(input=MESSAGE, metadata={"about": "towers"}, **sampled)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == SAMPLED["max_tokens"]
    assert client.responses.retrieve(whole.id) == whole
    events = list(client.responses.create(input=MESSAGE, stream=True, **sampled))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    user = {"role": "user", "content": FOLLOWING}
    later = client.responses.create(input=[user], previous_response_id=whole.id, **sampled)
    first = {"role": "user", "content": [{"type": "input_text", "text": MESSAGE}]}
    by_items = client.responses.create(input=[first, *whole.output, user], **sampled)
    assert later.output_text == by_items.output_text != whole.output_text
    client.responses.delete(whole.id)
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError as error:
        gone = f"{error.code} {error.param}"
    structured = {"model": model, "input": MESSAGE, "max_output_tokens": 200, "extra_body": {"seed": 1}}
    parsed = client.responses.parse(text_format=Tower, **structured)
    with client.responses.stream(text_format=Tower, **structured) as stream:
        assert "response.output_text.done" in [event.type for event in stream]
        streamed = stream.get_final_response()
    assert isinstance(parsed.output_parsed, Tower)
    assert streamed.output_parsed == parsed.output_parsed
    tool = {"type": "function", **FUNCTION}
    asked = {
        "model": model,
        "tools": [tool],
        "max_output_tokens": 200,
        "parallel_tool_calls": False,
        "extra_body": {"seed": 2},
    }
    called = client.responses.create(input=MESSAGE, tool_choice="required", **asked)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Pisa")
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "It is tall"}
    client.responses.create(input=[answered], previous_response_id=called.id, tool_choice="none", **asked)
    with client.responses.stream(input=MESSAGE, tool_choice="required", **asked) as stream:
        assert "response.function_call_arguments.delta" in [event.type for event in stream]
        (same,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert (same.name, same.arguments) == (call.name, call.arguments)
    return {
        "response": whole.token_ids,
        "response_chunks": events[-1].response.token_ids,
        "response_text": whole.output_text,
        "gone": gone,
    }


def run_adapter(client: openai.OpenAI) -> dict[str, object]:
    base, *adapters = client.models.list().data
    assert [each.parent for each in adapters] == [base.id]
    ids = {"return_token_ids": True}
    found = client.completions.create(model=adapters[0].id, prompt=PROMPT, extra_body=ids, **SAMPLED)
    assert found.model == adapters[0].id
    return {"adapter": found.choices[0].token_ids}


def run_embeddings(client: openai.OpenAI) -> dict[str, object]:
    model = client.models.list().data[0].id
    # The package asks for base64 where no format is given, and decodes it.
    found = client.embeddings.create(model=model, input=EMBEDDED)
    plain = client.embeddings.create(model=model, input=EMBEDDED, encoding_format="float")
    assert [each.embedding for each in found.data] == [each.embedding for each in plain.data]
    return {
        "embeddings": [each.embedding for each in found.data],
        "embedding_tokens": found.usage.prompt_tokens,
    }


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
    base, base_of_embeddings = sys.argv[1:]
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as made:
        seen = run(made) | run_responses(made) | run_adapter(made)
    with openai.OpenAI(base_url=base_of_embeddings, api_key="none", max_retries=0) as made:
        seen |= run_embeddings(made)
    print(json.dumps(seen | {"texts": asyncio.run(run_async(base))}))
