"""Feeds whose candidates are sessions."""
