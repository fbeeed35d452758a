"""Live observation of rollouts: a feed for the page, and rows for a trace file. It runs in the API process."""
