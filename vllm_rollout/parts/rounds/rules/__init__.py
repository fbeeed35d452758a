"""Tail batching: chooses the prompts of each round, and records their outcomes. Runs in the API process."""
