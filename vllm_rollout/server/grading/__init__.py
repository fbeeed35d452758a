"""Rewards that the server computes itself, while rollouts run. The API process runs it."""
