"""Rounds of sessions, over HTTP."""
