#!/bin/sh
# Starts the Redis of the prefix index with its users and without persistence, since workers publish lost
# entries again.
# users.acl is a copy of kvindex/users.acl; the passwords come from the environment.
set -eu

sha256() {
    printf %s "$1" | sha256sum | cut -d ' ' -f 1
}

sed -e "s/ADMIN_SHA256/$(sha256 "$REDIS_ADMIN_PASSWORD")/" \
    -e "s/ROUTER_SHA256/$(sha256 "$REDIS_ROUTER_PASSWORD")/" \
    -e "s/WORKER_SHA256/$(sha256 "$REDIS_WORKER_PASSWORD")/" \
    /etc/quire/users.acl >/tmp/users.acl
# noeviction, because evicted entries would leave gaps in prefixes. Protected mode checks only the default
# user, which is off.
exec redis-server --aclfile /tmp/users.acl --protected-mode no --dir /tmp --save "" --appendonly no \
    --maxmemory "$REDIS_MAX_MEMORY" --maxmemory-policy noeviction
