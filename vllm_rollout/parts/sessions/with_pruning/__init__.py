"""Sessions that pruning scores. These files are there if both parts are."""
