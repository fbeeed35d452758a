"""Lengths of answers, and what they cost in seconds. Runs in the API process and the engine core."""
