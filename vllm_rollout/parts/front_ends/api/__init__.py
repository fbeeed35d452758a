"""Several front ends of one engine."""
