# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""LangChain."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from steps import LONG, MODEL, PROMPT, STORY, find_tower, run
from tower import Arguments, Tower

MESSAGES = {"messages": [{"role": "user", "content": PROMPT}]}


def chat_model(base: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=LONG, temperature=0, **options)


def typed(base: str, **options: object) -> None:
    agent = create_agent(
        chat_model(base, **options),
        [tool(args_schema=Arguments)(find_tower)],
        response_format=ProviderStrategy(Tower),
    )
    answer = agent.invoke(MESSAGES, {"recursion_limit": 8})
    assert isinstance(answer["structured_response"], Tower)


def chat(base: str) -> None:
    """chat: `create_agent` with `ProviderStrategy` and a tool"""
    typed(base)


def responses(base: str) -> None:
    """responses: `create_agent` with `ProviderStrategy` and a tool"""
    typed(base, use_responses_api=True)


def texts(base: str) -> None:
    """chat and responses: `invoke` and `stream` of a text"""
    for uses_responses in (False, True):
        model = chat_model(base, use_responses_api=uses_responses)
        whole = model.invoke(STORY).text
        assert "".join(chunk.text for chunk in model.stream(STORY)) == whole
        assert len(set(whole.split())) >= 20, whole


run(chat, responses, texts)
