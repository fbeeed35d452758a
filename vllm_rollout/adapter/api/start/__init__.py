"""The start of a server, and of an engine that is profiled."""
