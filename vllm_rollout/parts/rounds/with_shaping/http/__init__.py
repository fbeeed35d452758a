"""The engine's size between rounds."""
