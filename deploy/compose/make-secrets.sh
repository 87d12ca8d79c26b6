#!/bin/sh
# Writes the cluster secret and the passwords into their volumes: the values in .env, else the existing ones,
# else random ones. Each volume contains the secrets that one kind of process needs.
set -eu

# secret VALUE FILE...: writes the value into all the files; an empty value means the first file's present
# content, or else a random value.
secret() {
    value=$1
    shift
    if [ -z "$value" ] && [ -s "$1" ]; then
        value=$(cat "$1")
    fi
    if [ -z "$value" ]; then
        value=$(od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n')
    fi
    for file in "$@"; do
        printf %s "$value" >"$file.new"
        chmod 444 "$file.new"
        mv -f "$file.new" "$file"
    done
}

cd "${1:-/run/quire}"
secret "${QUIRE_CLUSTER_SECRET:-}" router/cluster-secret worker/cluster-secret
secret "${REDIS_ADMIN_PASSWORD:-}" redis/admin-password
secret "${REDIS_ROUTER_PASSWORD:-}" redis/router-password router/redis-password
secret "${REDIS_WORKER_PASSWORD:-}" redis/worker-password worker/redis-password
secret "${GRAFANA_PASSWORD:-}" grafana/admin-password
