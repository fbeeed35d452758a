"""Rewards that the server computes itself, while rollouts run. This code runs in the API process."""
