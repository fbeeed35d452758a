"""Tail batching: which prompts a round runs, and what becomes of them. Runs in the API process."""
