"""How long a reward may take, and what a group's rewards are worth. Runs wherever rewards are graded."""
