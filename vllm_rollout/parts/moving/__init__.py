"""Data-parallel ranks: placement by predicted work, moves of groups, deaths, and other tensor-parallel sizes."""
