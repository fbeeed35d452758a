"""Decides which candidates of a group are returned and which are stopped. Runs in the engine core and the API
process."""
