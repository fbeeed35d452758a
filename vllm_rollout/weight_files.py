"""Tells whether a folder has weights that vLLM would load."""

from __future__ import annotations

import os
from pathlib import Path

PATTERNS = ("*.safetensors", "*.bin", "*.pt")
"""Names of files with weights. vLLM reads the files of the first pattern that fits any."""
OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Ends of names that vLLM leaves out (its `filter_files_not_needed_for_inference`): the trainer's own state."""
EXPECTED = f"no weights ({', '.join(PATTERNS)}, beside {', '.join(OF_TRAINING)})"
"""The lack of such files, for messages."""


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """True if the folder has weights. Raises: OSError, ValueError for a path that cannot be looked at."""
    for pattern in PATTERNS:
        if names := [path.name for path in Path(folder).glob(pattern)]:
            return pattern == PATTERNS[0] or not all(name.endswith(OF_TRAINING) for name in names)
    return False
