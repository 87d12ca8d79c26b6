"""Serves the router's OpenAI-compatible HTTP API; needs the extra ``http``."""
