# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""LangChain."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from steps import LONG, MODEL, PROMPT, find_tower, run
from tower import Arguments, Tower

MESSAGES = {"messages": [{"role": "user", "content": PROMPT}]}


def typed(base: str, **options: object) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=LONG, temperature=0, **options)
    agent = create_agent(
        model, [tool(args_schema=Arguments)(find_tower)], response_format=ProviderStrategy(Tower)
    )
    answer = agent.invoke(MESSAGES, {"recursion_limit": 8})
    assert isinstance(answer["structured_response"], Tower)


def chat(base: str) -> None:
    """chat: `create_agent` with `ProviderStrategy` and a tool"""
    typed(base)


def responses(base: str) -> None:
    """responses: `create_agent` with `ProviderStrategy` and a tool"""
    typed(base, use_responses_api=True)


run(chat, responses)
