# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents."""

from __future__ import annotations

import json
import urllib.request

import smolagents
from smolagents.agents import ActionStep
from steps import LONG, MODEL, PROMPT, STORY, find_tower, run


def model(base: str, **options: object) -> smolagents.OpenAIModel:
    client_options = {"max_retries": 0}
    return smolagents.OpenAIModel(
        MODEL, api_base=base, api_key="none", client_kwargs=client_options, max_tokens=LONG, **options
    )


def first_step(agent: smolagents.MultiStepAgent) -> ActionStep:
    """The agent's first step with a prompt for a small context: its own takes 1,900 tokens of 2,048."""
    agent.prompt_templates["system_prompt"] = "You are brief."
    agent.run(PROMPT)
    return next(step for step in agent.memory.steps if isinstance(step, ActionStep))


def closing_bias(base: str) -> dict[int, int]:
    """A bias for the marks that end an object: its tools have open schemas, which the tiny model fills."""
    bias = {}
    for mark in ('"', "}"):
        body = json.dumps({"prompt": mark, "add_special_tokens": False}).encode()
        request = urllib.request.Request(
            base.removesuffix("/v1") + "/tokenize", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            (token_id,) = json.load(answer)["tokens"]
        bias[token_id] = 100
    return bias


def texts(base: str) -> None:
    """`OpenAIModel`: whole and streamed"""
    greedy = model(base, temperature=0)
    messages = [{"role": "user", "content": [{"type": "text", "text": STORY}]}]
    whole = greedy.generate(messages)
    pieces = list(greedy.generate_stream(messages))
    assert "".join(piece.content or "" for piece in pieces) == whole.content
    assert len(set(whole.content.split())) >= 20, whole.content


def tools(base: str) -> None:
    """`ToolCallingAgent`: a call of its tool, whole and streamed"""
    for streams in (False, True):
        agent = smolagents.ToolCallingAgent(
            [smolagents.tool(find_tower)],
            model(
                base,
                temperature=0,
                tool_choice={"type": "function", "function": {"name": "find_tower"}},
                logit_bias=closing_bias(base),
            ),
            max_steps=1,
            stream_outputs=streams,
            verbosity_level=smolagents.LogLevel.OFF,
        )
        step = first_step(agent)
        assert "There is one in" in step.observations


def code(base: str) -> None:
    """`CodeAgent` with `use_structured_outputs_internally`: code in the JSON of its schema"""
    agent = smolagents.CodeAgent(
        [smolagents.tool(find_tower)],
        model(base, temperature=0),
        max_steps=1,
        use_structured_outputs_internally=True,
        verbosity_level=smolagents.LogLevel.OFF,
    )
    answer = json.loads(first_step(agent).model_output)
    assert sorted(answer) == ["code", "thought"]


run(texts, tools, code)
