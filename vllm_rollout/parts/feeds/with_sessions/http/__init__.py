"""Feeds of sessions in the API process."""
