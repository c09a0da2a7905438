#!/bin/sh
# Generates the stubs and builds the frontend in a folder: build.sh FOLDER. Debian's golang-go, protobuf-compiler,
# protoc-gen-go, protoc-gen-go-grpc, golang-google-grpc-dev and golang-github-golang-protobuf-1-5-dev are needed.
set -eu
protos=../../../protos
mkdir -p "$1/src"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"
protoc -I $protos --go_out="$out/src" --go-grpc_out="$out/src" $protos/triptych/common/v1/*.proto $protos/triptych/engine/v1/*.proto \
    $protos/triptych/options/v1/*.proto
export GO111MODULE=off GOPATH="$out:/usr/share/gocode" CGO_ENABLED=0
go vet ./*.go
go build -o "$out/frontend" ./*.go
