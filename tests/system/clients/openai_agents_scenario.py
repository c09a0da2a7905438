# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI Agents SDK."""

from __future__ import annotations

import agents
import openai
from steps import LONG, MODEL, PROMPT, find_tower, run
from tower import Tower

agents.set_tracing_disabled(True)


def typed(base: str, kind: type[agents.Model]) -> None:
    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    calls = []

    @agents.function_tool
    def tower(city: str) -> str:
        """Find a tower."""
        calls.append(city)
        return f"There is one in {city}."

    def agent_with(choice: str) -> agents.Agent:
        return agents.Agent(
            "guide",
            instructions="You are brief.",
            model=kind(MODEL, client),
            tools=[tower, agents.function_tool(find_tower)],
            output_type=Tower,
            model_settings=agents.ModelSettings(
                max_tokens=LONG, tool_choice=choice, parallel_tool_calls=False, temperature=0
            ),
        )

    answer = agents.Runner.run_sync(agent_with("auto"), PROMPT, max_turns=3)
    assert isinstance(answer.final_output, Tower)
    # The choice becomes "auto" after a call.
    called = agents.Runner.run_sync(agent_with("required"), PROMPT, max_turns=4)
    assert isinstance(called.final_output, Tower)
    assert any(isinstance(item, agents.ToolCallOutputItem) for item in called.new_items)


def chat(base: str) -> None:
    """chat: `output_type` with tools"""
    typed(base, agents.OpenAIChatCompletionsModel)


def responses(base: str) -> None:
    """responses: `output_type` with tools"""
    typed(base, agents.OpenAIResponsesModel)


run(chat, responses)
