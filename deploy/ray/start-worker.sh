#!/usr/bin/env bash
# Joins this host to the head at HEAD (host:port) with the token in RAY_AUTH_TOKEN_PATH, and stays in the foreground.
set -euo pipefail
: "${HEAD:?set HEAD to the address of the head, for example 10.1.2.3:6379}"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
[ -s "$RAY_AUTH_TOKEN_PATH" ] || {
    echo "no token in $RAY_AUTH_TOKEN_PATH: copy it from the head" >&2
    exit 2
}
exec ray start --block --disable-usage-stats --address="$HEAD" --metrics-export-port="${METRICS_PORT:-8080}" "$@"
