"""Lengths and step times on all ranks."""
