"""Code in the engine core's process that imports vLLM."""
