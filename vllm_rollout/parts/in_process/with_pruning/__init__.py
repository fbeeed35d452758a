"""What a trainer learns with in its own process, with the part pruning."""
