"""Learning on all ranks, and the learned state on disk."""
