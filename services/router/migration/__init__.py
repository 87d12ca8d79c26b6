"""Moves running answers between workers, and copies their blocks."""
