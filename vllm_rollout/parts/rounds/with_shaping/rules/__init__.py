"""Forecasts of rounds by tensor-parallel size."""
