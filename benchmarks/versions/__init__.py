"""Every supported vLLM, in an environment of its own: what of our tests passes."""
