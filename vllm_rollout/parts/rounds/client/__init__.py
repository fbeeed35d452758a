"""Runs and their rounds, for trainers."""
