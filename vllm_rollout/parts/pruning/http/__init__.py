"""Rewards, quality heads, reports and state over HTTP."""
