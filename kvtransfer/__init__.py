"""Moves KV blocks between workers: their layout, the frames on the wire, pushes and pulls."""
