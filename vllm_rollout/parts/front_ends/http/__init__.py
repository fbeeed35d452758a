"""Requests between API processes."""
