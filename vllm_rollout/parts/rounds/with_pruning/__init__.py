"""Runs and learned state in one saved state. These files are there if both parts are."""
