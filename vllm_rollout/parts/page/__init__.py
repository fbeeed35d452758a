"""Shows and records rollouts: the page, recordings, receipts and traces."""
