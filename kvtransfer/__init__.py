"""Moving KV blocks between workers: layout, frames, push."""
