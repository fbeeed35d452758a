"""Tail batching: runs of short and long rounds. Invariant: the prompts of a round are on disk before it runs."""
