"""Moves KV blocks between workers: the frames on the wire, pushes and pulls."""
