"""Code in the worker processes that imports vLLM."""
