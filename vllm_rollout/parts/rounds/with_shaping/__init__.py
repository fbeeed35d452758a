"""A round's parallelism, the engine's tensor-parallel size between rounds, and runs in a simulation.

These files are there if both parts are.
"""
