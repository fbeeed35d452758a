"""Feeds of agents, for trainers."""
