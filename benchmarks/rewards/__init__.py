"""Rewards: graders and time limits."""
