"""Sessions on the page and in recordings, over HTTP."""
