"""Endpoints of trainers' own servers."""
