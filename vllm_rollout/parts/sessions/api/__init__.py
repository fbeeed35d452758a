"""Sessions in the API process."""
