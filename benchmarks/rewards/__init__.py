"""What grading costs, and what it gains where the rollouts are."""
