"""Quality heads, hidden states of scored candidates, and their training."""
