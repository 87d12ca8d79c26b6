#!/bin/sh
# Starts Redis with the passwords of its volume.
set -eu
REDIS_ADMIN_PASSWORD=$(cat /run/quire/admin-password)
REDIS_ROUTER_PASSWORD=$(cat /run/quire/router-password)
REDIS_WORKER_PASSWORD=$(cat /run/quire/worker-password)
export REDIS_ADMIN_PASSWORD REDIS_ROUTER_PASSWORD REDIS_WORKER_PASSWORD
exec sh /etc/quire/start.sh
