"""Converts text to token ids and back without torch or transformers; chat template and stop strings."""
