"""Rewards: graders, time limits, and groups that end when their rewards differ."""
