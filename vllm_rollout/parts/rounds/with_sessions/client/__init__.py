"""Rounds of agents, for trainers."""
