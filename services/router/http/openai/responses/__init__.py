"""OpenAI's Responses API, without storage: each request contains its whole conversation."""
