"""One piece in this process: `python -m benchmarks.gpu_check.piece NAME cuda|cpu` prints its result."""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import ExitStack
from typing import Any

from benchmarks.gpu_check.engine import Engines
from benchmarks.gpu_check.pieces import PIECES


def run(name: str, device: str, engines: Engines | None = None) -> dict[str, Any]:
    """The piece's result as JSON. `engines`: instead of its own, for a rehearsal."""
    piece = PIECES[name]
    try:
        with ExitStack() as stack:
            if piece.starts_an_engine:
                engines = engines or stack.enter_context(Engines(device))
                result = piece.function(name)(engines)
            else:
                result = piece.function(name)(device)
    except Exception:
        return {"status": "error", "error": traceback.format_exc()[-6000:]}
    status = "passed" if result.passed else "failed"
    return {"status": status, "checks": [list(check) for check in result.checks], "values": result.values}


if __name__ == "__main__":
    print("RESULT " + json.dumps(run(*sys.argv[1:])), flush=True)
