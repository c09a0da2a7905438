#!/usr/bin/env bash
# `triptych serve` with TLS and an API key, and a client of each protocol: tls.sh 50051 8000 [MODEL]
# The ports of gRPC and of HTTP.
# In production the certificate comes from a CA; here it is one that openssl makes for this run.
set -euo pipefail

GRPC=$1 HTTP=$2
shift 2
FOLDER=$(mktemp -d)
trap 'kill "${SERVER:-$$}" 2>/dev/null; wait; rm -rf "$FOLDER"' EXIT
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost \
    -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout "$FOLDER/key.pem" -out "$FOLDER/cert.pem" 2>/dev/null
TRIPTYCH_API_KEY=$(triptych key new 2>/dev/null)
export TRIPTYCH_API_KEY TRIPTYCH_CA_CERTS="$FOLDER/cert.pem"

triptych serve "$@" --port "$GRPC" --http-port "$HTTP" --ready-file "$FOLDER/ready" \
    --ssl-certfile "$FOLDER/cert.pem" --ssl-keyfile "$FOLDER/key.pem" >&2 &
SERVER=$!
until [ -e "$FOLDER/ready" ]; do sleep 0.2; kill -0 "$SERVER"; done

echo "without a key: $(curl -sS --cacert "$FOLDER/cert.pem" -o /dev/null -w '%{http_code}' "https://127.0.0.1:$HTTP/v1/models")"
curl -sS --fail --cacert "$FOLDER/cert.pem" -H "authorization: Bearer $TRIPTYCH_API_KEY" \
    "https://127.0.0.1:$HTTP/v1/completions" -H 'content-type: application/json' \
    -d '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}'
echo
triptych complete --url "grpcs://127.0.0.1:$GRPC" --prompt "Once upon a time" --max-tokens 16 --temperature 0
