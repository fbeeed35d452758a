"""Limits the time of a reward, and computes statistics of a group's rewards. Runs in any process that grades
rewards."""
