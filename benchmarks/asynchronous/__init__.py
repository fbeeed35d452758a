"""Seconds to a reward at equal devices: waiting, racing, and training that does not wait for its rollouts."""
