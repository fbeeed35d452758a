"""Learning in a trainer's own process, with the part pruning."""
