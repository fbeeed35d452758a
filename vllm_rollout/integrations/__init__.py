"""Doors into trainers that offer one. Invariant: importing this imports neither the trainer nor vllm nor torch."""
