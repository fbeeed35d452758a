"""Sessions: candidates that are whole conversations, one OpenAI request a turn (docs/guides/agents.md)."""
