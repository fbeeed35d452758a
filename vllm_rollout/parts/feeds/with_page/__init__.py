"""Feeds on the page. These files are there if both parts are."""
