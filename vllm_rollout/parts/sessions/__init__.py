"""Candidates that are whole conversations, with one OpenAI request per turn (docs/guides/agents.md)."""
