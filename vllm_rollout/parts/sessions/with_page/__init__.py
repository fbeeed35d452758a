"""Sessions on the page and in recordings. These files are there if both parts are."""
