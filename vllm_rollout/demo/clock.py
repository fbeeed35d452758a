"""Lines with the time that the demo has run.

Invariant: they read the same on a terminal and in a log.
"""

from __future__ import annotations

import time

from rich.console import Console


def shown(seconds: float) -> str:
    """A rough time for people, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


class Clock:
    """Prints lines with the time since the clock was made."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self.console.print(f"[dim]{minutes}:{seconds:02d}[/]  {text}", highlight=False, soft_wrap=True)
