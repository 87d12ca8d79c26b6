"""Records which workers have cached which prefixes: block layout and hashes, Redis index, membership."""
