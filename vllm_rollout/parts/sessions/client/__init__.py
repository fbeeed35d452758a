"""Agents and their sessions, for trainers."""
