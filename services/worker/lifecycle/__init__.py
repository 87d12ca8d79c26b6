"""The start of a worker from its settings, and its end."""
