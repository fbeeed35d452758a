"""One client of several servers."""
