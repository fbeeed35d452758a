"""Clients of the server's endpoints."""
