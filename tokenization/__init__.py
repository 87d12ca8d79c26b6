"""Converts text to token ids and back without torch or transformers; chat template, stop strings, answers."""
