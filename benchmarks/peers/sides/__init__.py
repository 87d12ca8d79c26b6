"""The processes that are compared: each module runs one engine, in that engine's own Python environment."""
