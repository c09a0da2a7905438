#!/usr/bin/env bash
# OpenAI's API from a shell, with curl and jq: complete.sh http://127.0.0.1:8000/v1
set -euo pipefail

URL=$1
SETTINGS='"temperature": 0, "max_tokens": 24'
PROMPT="{\"prompt\": \"Once upon a time\", $SETTINGS"
CHAT="{\"messages\": [{\"role\": \"user\", \"content\": \"Once upon a time\"}], $SETTINGS}"

post() {
    curl --silent --show-error --fail-with-body --no-buffer --header 'content-type: application/json' --data "$2" "$URL/$1"
}

echo "model   $(curl --silent --show-error --fail "$URL/models" | jq --raw-output '.data[0].id')"
echo "whole   $(post completions "$PROMPT}" | jq '.choices[0].text')"
# Lines that begin with a colon are heartbeats; the last event is no JSON.
echo "stream  $(post completions "$PROMPT, \"stream\": true}" | sed -n 's/^data: {/{/p' | jq --slurp '[.[].choices[0].text] | join("")')"
echo "chat    $(post chat/completions "$CHAT" | jq '.choices[0].message.content')"
