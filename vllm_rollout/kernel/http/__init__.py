"""The HTTP server: request bodies, routes and the rollout service. It knows an engine only by the protocol in
`engine.py`."""
