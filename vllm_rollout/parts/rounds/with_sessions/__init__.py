"""Rounds whose candidates are sessions. These files are there if both parts are."""
