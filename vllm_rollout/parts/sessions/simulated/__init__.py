"""Sessions in a simulation."""
