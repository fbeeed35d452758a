"""An engine that is rebuilt at another size."""
