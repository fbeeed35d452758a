"""Calls that learn, and readings of learned data."""
