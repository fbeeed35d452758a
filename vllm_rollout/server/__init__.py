"""HTTP: bodies, routes, the rollout service and the client. Knows an engine only by the protocol in `engine.py`."""
