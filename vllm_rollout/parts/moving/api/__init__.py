"""Moves, deaths of ranks, and rebuilt engines."""
