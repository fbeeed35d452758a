"""Code in the API process that imports vLLM."""
