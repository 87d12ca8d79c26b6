"""The OpenAI-compatible HTTP API, served by the router; needs the extra ``http``."""
