"""What is seen of rollouts while they run: a live feed for a page, and rows for a file (the API process)."""
