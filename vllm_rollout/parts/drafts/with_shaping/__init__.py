"""Drafts in a simulation, which needs costs of steps. These files are there if both parts are."""
