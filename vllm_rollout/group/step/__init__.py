"""The order of one engine step, and groups that leave it for another engine. Runs in the engine core."""
