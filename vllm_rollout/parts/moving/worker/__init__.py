"""KV blocks between workers."""
