"""The order of one engine step, and groups that move to another engine. Runs in the engine core."""
