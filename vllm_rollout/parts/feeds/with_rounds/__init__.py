"""Feeds whose groups stop and go on. These files are there if both parts are."""
