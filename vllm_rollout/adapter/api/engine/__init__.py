"""The engine of the rollout service, in parts: learning, shaping, moves."""
