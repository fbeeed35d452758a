"""Checks request fields, makes plans of them, and decides when a group may start.

Runs in the API process. Plans travel to the engine core.
"""
