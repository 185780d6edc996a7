#!/usr/bin/env bash
# Starts a Ray head node on this host with token authentication and metrics at fixed ports, and stays in the foreground.
#
#   deploy/ray/start-head.sh                     listens on 127.0.0.1 only
#   NODE_IP=10.1.2.3 deploy/ray/start-head.sh    for workers on other hosts: deploy/ray/start-worker.sh
#
# The token is made on the first start and kept in RAY_AUTH_TOKEN_PATH; whoever submits a job needs the same file.
# Prometheus finds every node in $TEMP_DIR/prom_metrics_service_discovery.json.
set -euo pipefail
NODE_IP=${NODE_IP:-127.0.0.1}
GCS_PORT=${GCS_PORT:-6379}
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
METRICS_PORT=${METRICS_PORT:-8080}
# Of the agent that starts jobs: a second cluster on this host needs another one.
AGENT_PORT=${AGENT_PORT:-52365}
TEMP_DIR=${TEMP_DIR:-/tmp/ray}
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
# Without this Ray listens on the host's address even where --node-ip-address says 127.0.0.1.
[ "$NODE_IP" = 127.0.0.1 ] && export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0

if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
fi
# GRAFANA, PROMETHEUS: base URLs, so that Ray's dashboard shows its metrics pages.
[ -n "${GRAFANA:-}" ] && export RAY_GRAFANA_HOST=$GRAFANA
[ -n "${PROMETHEUS:-}" ] && export RAY_PROMETHEUS_HOST=$PROMETHEUS
exec ray start --head --block --disable-usage-stats \
    --node-ip-address="$NODE_IP" --port="$GCS_PORT" --temp-dir="$TEMP_DIR" --metrics-export-port="$METRICS_PORT" \
    --dashboard-host="$NODE_IP" --dashboard-port="$DASHBOARD_PORT" --dashboard-agent-listen-port="$AGENT_PORT" "$@"
