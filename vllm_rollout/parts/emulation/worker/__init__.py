"""The emulated device in a worker's place."""
