"""The command that installs what an extra of this package needs, for messages.

It names the packages of the extra: they are in pip's registry, and this package is not.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

NAME = "vllm-rollout"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Has the CPU builds of torch and of what belongs to it."""


def install_command(extra: str) -> str:
    """As `pip install 'ray>=2.43'`. Raises: ValueError for an extra that pyproject.toml does not have."""
    try:
        rows = requires(NAME) or []
    except PackageNotFoundError:  # sources that nobody has installed
        return f"pip install --no-build-isolation {shlex.quote(f'.[{extra}]')} in a checkout"
    pairs = [row.partition(";") for row in rows]
    needs = [need.strip() for need, _, marker in pairs if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    if not needs:
        raise ValueError(f"{NAME} has no extra {extra!r}")
    index = f" --extra-index-url {TORCH_CPU_INDEX}" if extra == "cpu" else ""
    return f"pip install {shlex.join(needs)}{index}"
