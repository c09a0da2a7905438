"""OpenAI's API with the package `langchain-openai`: python langchain_chat.py http://127.0.0.1:8000/v1."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="", temperature=0, max_tokens=24)
print("chat   ", json.dumps(llm.invoke("Once upon a time").content))
