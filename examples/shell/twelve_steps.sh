#!/usr/bin/env bash
# Twelve steps with the public API from a shell: twelve_steps.sh HOST:PORT, with jq and buf (or $BUF).
# Steps and results are described in ../README.md. No schema is needed: buf asks the server for it by reflection.
# Each call is a process with a connection of its own, also in step 10; in step 12 the log of Go's HTTP/2 shows GOAWAY.
set -euo pipefail

BUF=${BUF:-buf}
URL=http://$1
API=triptych.api.v1
PROTOS=$(dirname "$0")/../../third_party
TRACEPARENT=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
trap 'echo "surprise: line $LINENO failed" >&2' ERR

PROMPT='"prompt": "Once upon a time"'
SHORT="{$PROMPT, \"sampling\": {\"temperature\": 0, \"maxTokens\": 24, \"ignoreEos\": true}}"
# 16 outputs as long as the model allows: many seconds.
LONG="{$PROMPT, \"sampling\": {\"n\": 16, \"ignoreEos\": true}}"

surprise() {
    echo "surprise: $*" >&2
    exit 1
}

show() {
    printf '%2d %-12s %s\n' "$1" "$2" "$3"
}

# call METHOD REQUEST [OPTIONS]: REQUEST is JSON, or @FILE.
call() {
    "$BUF" curl --protocol grpc --http2-prior-knowledge -d "$2" "${@:3}" "$URL/$1"
}

# refused CODE METHOD REQUEST [OPTIONS]: the error of a call that must fail with the gRPC status CODE, as JSON.
refused() {
    local status=0
    call "${@:2}" 2>"$WORK/error" >&2 || status=$?
    # buf's exit code is that of gRPC times 8.
    ((status == $1 * 8)) || surprise "exit code $status: $(head -c 500 "$WORK/error")"
    cat "$WORK/error"
}

# violation FILTER: of the one field violation in the error on stdin.
violation() {
    jq -r '.details[] | select(.type == "google.rpc.BadRequest").value | . + "=" * (-length % 4 + 4)' \
        | base64 -di \
        | "$BUF" convert "$PROTOS" --type google.rpc.BadRequest --from '-#format=binpb' --to '-#format=json' \
        | jq -r ".fieldViolations | if length == 1 then .[0] else error(\"not one violation\") end | $1"
}

# The text of the stream on stdin: started, then deltas, then finished.
joined() {
    jq -sj 'if has(0) and (.[0] | has("started")) and (.[-1] | has("finished")) and all(.[1:-1][]; has("delta"))
            then .[].delta.text // empty else error("events \(map(keys))") end'
}

wait_until_idle() {
    local info give_up_at=$((SECONDS + 5))
    while info=$(call $API.ModelService/GetServerInfo '{}'); jq -e 'any(.engines[]; .numInFlight > 0)' <<<"$info"; do
        ((SECONDS <= give_up_at)) || surprise "still in flight after 5 s"
    done >"$WORK/busy"
}

# x_times N: so many x.
x_times() {
    head -c "$1" /dev/zero | tr '\0' x
}

health=$(call grpc.health.v1.Health/Check "{\"service\": \"$API.InferenceService\"}")
[[ $(jq -r .status <<<"$health") == SERVING ]] || surprise "health $health"
show 1 health SERVING

models=$(call $API.ModelService/ListModels '{}')
show 2 models "$(jq -r '.models[] | "\(.name), up to \(.maxModelLen) tokens"' <<<"$models")"

answer=$(call $API.InferenceService/GenerateOnce "$SHORT")
jq -e '.outputs[0].reason == "FINISH_REASON_LENGTH" and .usage.numCompletionTokens == (.outputs[0].tokenIds | length)' \
    <<<"$answer" >"$WORK/check" || surprise "answer $answer"
show 3 unary "$(jq '.outputs[0].tokenIds | length' <<<"$answer") tokens, finished by length"
text=$(jq -j '.outputs[0].text' <<<"$answer")

streamed=$(call $API.InferenceService/Generate "$SHORT" | joined)
[[ $streamed == "$text" ]] || surprise "another text than the unary answer: $streamed"
show 4 stream "the text of the unary answer"

# grep ends with the first delta, and buf with its next message, which has no reader.
{ call $API.InferenceService/Generate "$LONG" || true; } | grep -q '"delta"' || surprise "no delta before the end"
wait_until_idle
show 5 cancel "nothing in flight"

refused 4 $API.InferenceService/GenerateOnce "$LONG" --timeout 1s >"$WORK/refusal"
wait_until_idle
show 6 deadline "DEADLINE_EXCEEDED, nothing in flight"

refused 5 $API.InferenceService/GenerateOnce "{$PROMPT, \"model\": \"nope\"}" >"$WORK/refusal"
show 7 "bad model" "NOT_FOUND: $(jq -r .message "$WORK/refusal")"

hot="{$PROMPT, \"sampling\": {\"temperature\": 99}}"
refused 3 $API.InferenceService/GenerateOnce "$hot" >"$WORK/refusal"
show 8 "bad field" "INVALID_ARGUMENT in $(violation '"\(.field): \(.description)"' <"$WORK/refusal")"

echo "{\"prompt\": \"$(x_times $((5 << 20)))\"}" >"$WORK/long"
refused 3 $API.InferenceService/GenerateOnce "@$WORK/long" >"$WORK/refusal"
# buf itself takes at most 4 MiB of an answer: in two halves.
echo "{\"text\": \"$(x_times 250000)\", \"returnTokens\": true}" >"$WORK/text"
for _ in 1 2; do
    call $API.TokenizerService/Tokenize "@$WORK/text" | jq '.tokens | if .[-1] == "x" then length else error("last token \(.[-1])") end'
done >"$WORK/lengths"
num_tokens=$(jq -s add "$WORK/lengths")
show 9 "big prompt" "INVALID_ARGUMENT in $(violation .field <"$WORK/refusal"); $num_tokens tokens with their names came back"

call $API.InferenceService/Generate "$SHORT" >"$WORK/first" &
call $API.InferenceService/Generate "$SHORT" >"$WORK/second"
wait $!
[[ $(joined <"$WORK/first") == "$text" && $(joined <"$WORK/second") == "$text" ]] || surprise "another text"
show 10 "two streams" "the text of the unary answer, twice"

call $API.InferenceService/Generate "$SHORT" -v -H "x-request-id: twelve-steps" -H "traceparent: $TRACEPARENT" \
    2>"$WORK/log" >"$WORK/stream"
# The first call of the process is reflection.
header() {
    sed -n "s/^buf: < (#2) $1: //p" "$WORK/log"
}
show 11 ids "x-request-id $(header X-Request-Id), x-trace-id $(header X-Trace-Id)"

# A stream of reflection that stays open until the server asks the process to leave its connection, and then gets an
# answer more. The next call is on another connection.
mkfifo "$WORK/requests"
GODEBUG=http2debug=1 call grpc.reflection.v1.ServerReflection/ServerReflectionInfo "@$WORK/requests" \
    2>"$WORK/log" >"$WORK/answers" &
exec 3>"$WORK/requests"
echo '{"listServices": ""}' >&3
give_up_at=$((SECONDS + 60))
until grep -q "received GOAWAY" "$WORK/log"; do
    ((SECONDS <= give_up_at)) || surprise "no GOAWAY in 60 s"
    sleep 0.1
done
echo '{"listServices": ""}' >&3
exec 3>&-
wait $!
[[ $(jq -s length "$WORK/answers") == 2 ]] || surprise "answers $(cat "$WORK/answers")"
call $API.InferenceService/Generate "$SHORT" | joined >"$WORK/text"
show 12 reconnect "a stream outlived its connection, the next call took another"
echo OK
