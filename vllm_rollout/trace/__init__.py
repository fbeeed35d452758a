"""Recorded lengths: rows, reader, writer."""
