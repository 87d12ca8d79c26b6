"""Separate workers for prompts and answers beside one worker for both, on the same processors."""
