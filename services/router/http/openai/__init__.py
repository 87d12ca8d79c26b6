"""OpenAI's API: chat and completions."""
