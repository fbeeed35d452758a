"""Tokens and seconds that a rollout saved."""
