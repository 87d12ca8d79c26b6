"""Runs one step: tensors in, tokens out, and the time that it takes."""
