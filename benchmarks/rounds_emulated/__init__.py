"""Rounds on an emulated device at a paper's scale, beside the simulator."""
