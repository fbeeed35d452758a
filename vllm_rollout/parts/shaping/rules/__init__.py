"""Lengths of answers, and their cost in seconds. Runs in the API process and the engine core."""
