"""Lengths: what is known of them, their cost, and the number and order of candidates by them (DARTS)."""
