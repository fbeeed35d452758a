"""Seconds to a reward: the same policy trained with and without each feature."""
