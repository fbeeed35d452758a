"""Generates the parts of docs/reference that come from the code: HTTP, command line, metrics.

`python -m docs_tools.reference FOLDER` writes them. `docs_tools/hooks.py` puts each in its page.

Invariant: each name, type and default is read from the code.
"""
