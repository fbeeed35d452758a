"""Moves between emulated devices. These files are there if both parts are."""
