"""Groups that race inside vLLM, the endpoints that start them, and their clients: one folder per process."""
