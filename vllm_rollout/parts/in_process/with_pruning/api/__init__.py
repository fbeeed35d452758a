"""Quality heads, votes and rewards of an engine in a trainer's own process."""
