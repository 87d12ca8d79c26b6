"""Loads a model's weights, whole or a rank's part, and identifies them."""
