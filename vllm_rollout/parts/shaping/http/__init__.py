"""Lengths and their cost in the API process: budgets, the order of groups, and metrics."""
