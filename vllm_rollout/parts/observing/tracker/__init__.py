"""OBSERVES: what the model's outputs say about a candidate, per row and per step."""
