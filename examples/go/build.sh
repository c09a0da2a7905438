#!/bin/sh
# Generates the API from the protos and compiles the program with Debian's packages: build/twelve_steps.
set -eu
cd "$(dirname "$0")"
protos=../../protos
rm -rf build && mkdir -p build/src
protoc -I "$protos" --go_out=build/src --go-grpc_out=build/src \
    "$protos"/triptych/api/v1/*.proto "$protos"/triptych/common/v1/*.proto
GO111MODULE=off GOPATH="$PWD/build:/usr/share/gocode" go build -o build/twelve_steps twelve_steps.go
