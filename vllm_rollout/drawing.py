"""Shared parts of all pictures.

Invariant: matplotlib, an optional package, is imported only to draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#1e293b"


@contextmanager
def figure_at(path: Path, inches: tuple[float, float], style: Mapping[str, Any], **settings: Any) -> Iterator[Any]:
    """A figure that is written to `path` at the end of the context.

    `style`: matplotlib's rcParams. `settings`: further arguments of the figure.

    Raises: OSError, or ValueError for a file ending that matplotlib does not know.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.family": "DejaVu Sans", "text.color": INK, **style}):
        figure = plt.figure(figsize=inches, dpi=120, facecolor="white", **settings)
        yield figure
        try:
            figure.savefig(path)
        except OSError as error:  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        plt.close(figure)
