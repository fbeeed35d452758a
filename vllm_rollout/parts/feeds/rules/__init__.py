"""Decisions about feeds. Invariant: the standard library only."""
