"""Compares separate workers for prompts and answers with one worker for both, on the same processors."""
