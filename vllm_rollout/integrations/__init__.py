"""Integrations with trainers. Invariant: importing this package imports neither the trainer nor vllm nor torch."""
