"""Repeatedly kills ranks of a server, and counts what happens to its rollouts."""
