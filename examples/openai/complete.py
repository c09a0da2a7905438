"""OpenAI's API with the package `openai`: python complete.py http://127.0.0.1:8000/v1."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

PROMPT = "Once upon a time"

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
print("model  ", model)

whole = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=24)
print("whole  ", json.dumps(whole.choices[0].text))

stream = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=24, stream=True)
print("stream ", json.dumps("".join(chunk.choices[0].text for chunk in stream)))

chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=24
)
print("chat   ", json.dumps(chat.choices[0].message.content))
