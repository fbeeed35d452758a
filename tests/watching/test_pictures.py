"""The pictures of docs/watch.md are made by code that still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .browser import needs_browser
from .test_page import over, rollout


@needs_browser
def test_pictures_are_made_of_a_recording(tmp_path: Path) -> None:
    row = rollout("it", *(over(i) for i in range(8)), state="over", seconds=10.0)
    (tmp_path / "trace.jsonl").write_text(json.dumps({**row, "model": "m", "group_size": 8}) + "\n")
    command = [sys.executable, "-m", "tests.watching.pictures", str(tmp_path / "trace.jsonl"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)  # the browser's loop must not be this process's
    assert [(tmp_path / f"watch_{view}.png").stat().st_size > 10_000 for view in ("now", "step")] == [True, True]
