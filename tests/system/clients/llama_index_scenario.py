# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from steps import LONG, MODEL, PROMPT, STORY, find_tower, run
from tower import Arguments, Tower


def model(base: str, **options: Any) -> OpenAILike:
    return OpenAILike(
        MODEL, api_base=base, api_key="none", context_window=2048, max_tokens=LONG, max_retries=0, **options
    )


def texts(base: str) -> None:
    """`complete`, `chat` and their streams"""
    completions = model(base, temperature=0)
    text = completions.complete(STORY).text
    assert "".join(piece.delta or "" for piece in completions.stream_complete(STORY)) == text
    chats = model(base, temperature=0, is_chat_model=True)
    messages = [ChatMessage(role="user", content=STORY)]
    answer = chats.chat(messages).message.content
    assert "".join(piece.delta or "" for piece in chats.stream_chat(messages)) == answer
    assert len(set(answer.split())) >= 20, answer


def tools(base: str) -> None:
    """`chat_with_tools`: a demanded call, whole and streamed"""
    llm = model(base, is_chat_model=True, is_function_calling_model=True)
    tool = FunctionTool.from_defaults(find_tower, fn_schema=Arguments)
    answer = llm.chat_with_tools([tool], PROMPT, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert find_tower(**call.tool_kwargs) == tool.call(**call.tool_kwargs).content
    *_, last = llm.stream_chat_with_tools([tool], PROMPT, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(last)
    find_tower(**call.tool_kwargs)


def typed(base: str) -> None:
    """`structured_predict`, by a schema (also its stream) and by a call"""
    prompt = PromptTemplate(PROMPT)
    options = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0}
    by_schema = model(base, should_use_structured_outputs=True, **options)
    by_call = model(base, should_use_structured_outputs=False, **options)
    for llm in (by_schema, by_call):
        assert isinstance(llm.structured_predict(Tower, prompt), Tower)
    *_, last = by_schema.stream_structured_predict(Tower, prompt)
    Tower.model_validate(last.model_dump())


run(texts, tools, typed)
