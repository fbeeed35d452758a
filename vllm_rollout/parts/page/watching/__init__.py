"""Commands that show rollouts from outside the server: page, terminal view, receipts and export."""
