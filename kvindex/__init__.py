"""Who holds which prefix: block hashing, the Redis index, membership."""
