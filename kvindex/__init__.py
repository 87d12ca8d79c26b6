"""Who holds which prefix: the layout and hashes of blocks, the Redis index, membership."""
