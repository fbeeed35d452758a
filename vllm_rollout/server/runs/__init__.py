"""Tail batching: runs of short and long rounds. Invariant: what a round took is on disk before it runs."""
