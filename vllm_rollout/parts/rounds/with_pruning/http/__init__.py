"""The saved state over HTTP."""
