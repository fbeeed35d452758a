"""Feeds, for trainers."""
