"""Clients of our endpoints."""
