"""Tail batching: runs of short and long rounds (RollPacker)."""
