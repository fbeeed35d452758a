"""The files in the folder of --rollout-state."""

LEARNED = "learned.state"
"""Calibration, quality heads, lengths, as the engine says them."""
RUNS = "runs.sqlite"
