# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""pydantic-ai."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import LONG, MODEL, PROMPT, find_tower, run
from tower import Tower


def typed(base: str, kind: Any) -> None:
    model = kind(MODEL, provider=OpenAIProvider(base_url=base, api_key="none"))
    agent = Agent(model, output_type=NativeOutput(Tower), tools=[find_tower])
    answer = agent.run_sync(
        PROMPT,
        model_settings={"max_tokens": LONG, "temperature": 0},
        usage_limits=UsageLimits(request_limit=5),
    )
    assert isinstance(answer.output, Tower)


def chat(base: str) -> None:
    """chat: `NativeOutput` with a tool"""
    typed(base, OpenAIChatModel)


def responses(base: str) -> None:
    """responses: `NativeOutput` with a tool"""
    typed(base, OpenAIResponsesModel)


run(chat, responses)
