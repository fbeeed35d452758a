"""Grades answers while rollouts run."""
