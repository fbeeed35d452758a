"""The start of graders and judges, and answers of vLLM's endpoints that are graded."""
