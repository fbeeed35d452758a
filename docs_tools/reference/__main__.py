"""`python -m docs_tools.reference FOLDER`: write each generated part into a file of the folder."""

import sys
from pathlib import Path

from docs_tools.reference import cli, http, metrics

PARTS = {"http": http.part, "cli": cli.part, "metrics": metrics.part}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        (folder / f"{name}.md").write_text(part())
