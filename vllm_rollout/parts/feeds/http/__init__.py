"""Feeds: prompts go in, batches of complete groups come out. Invariant: a group is in one batch."""
