"""Runs at several servers, with the part rounds."""
