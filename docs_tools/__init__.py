"""Builds the site of docs/: hooks of mkdocs, and the generated half of docs/reference. No part of the package."""
