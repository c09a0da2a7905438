#!/usr/bin/env bash
# nginx in front of one frontend, with deploy/nginx.conf, until Ctrl-C:
#   nginx.sh 127.0.0.1:50051 127.0.0.1:8000 127.0.0.1:50052 127.0.0.1:8001
# The frontend's addresses of gRPC and HTTP, then those to listen at.
set -euo pipefail

FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
sed -e "/frontend-1/d" -e "s/frontend-0:50051/$1/" -e "s/frontend-0:8000/$2/" \
    -e "s/listen 50051/listen $3/" -e "s/listen 8000/listen $4/" \
    -e "/^user /d" -e "s#/var/log/nginx/error.log#stderr#" \
    "$(dirname "$0")/../../deploy/nginx.conf" > "$FOLDER/nginx.conf"
nginx -p "$FOLDER" -c "$FOLDER/nginx.conf" -g "daemon off; pid $FOLDER/pid;"
