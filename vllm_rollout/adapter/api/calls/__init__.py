"""Calls from an API process to its engine cores: vLLM's client of several ranks, which may die, and our operations."""
