"""Reads and writes recorded candidate lengths (traces)."""
