"""Endpoints that trainers need beside vLLM's own (`--rollout-compat`)."""
