"""Conformance kit: real trainers, out of the registry, at our server. `python -m conformance --help`."""
