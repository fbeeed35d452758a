"""Runs our tests on every supported vLLM, each in an environment of its own."""
