"""Scores and rewards -> who is worth going on. Runs in the engine core; reports and votes in the API process."""
