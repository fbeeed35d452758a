"""Touches vLLM in the engine core's process."""
