"""Touches vLLM in the worker processes."""
