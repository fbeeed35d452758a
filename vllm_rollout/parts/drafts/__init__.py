"""Tokens of siblings and earlier answers as drafts, which vLLM verifies."""
