"""Runs of rounds in a simulation."""
