"""Rewards: graders, time limits, groups that end when they teach."""
