"""Text to token ids and back: tokenizer, chat template, stop strings; no torch, no transformers."""
