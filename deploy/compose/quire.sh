#!/bin/sh
# Starts quire with the secrets of its volume. They are read here because settings are flags or variables, and
# compose.yaml does not know the secrets.
set -eu
folder=${SECRETS:-/run/quire}
QUIRE_CLUSTER_SECRET=$(cat "$folder/cluster-secret")
QUIRE_REDIS_URL="redis://$REDIS_USER:$(cat "$folder/redis-password")@redis:6379/0"
export QUIRE_CLUSTER_SECRET QUIRE_REDIS_URL
exec quire "$@"
