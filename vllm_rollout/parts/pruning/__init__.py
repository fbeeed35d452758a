"""Stops candidates by scores, learns from rewards, and votes (ARRoL)."""
