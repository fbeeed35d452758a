"""Touches vLLM in the API process."""
