"""Files of rounds that need the part page."""
