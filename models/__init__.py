"""The bundled demo model: its language, tokenizer, training and evaluation, and random models for tests."""
