"""The command that installs the packages of an extra of this package, for messages.

It names the packages of the extra: pip's registry has them, but not this package.
"""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

NAME = "vllm-rollout"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of the CPU builds of torch and its companions."""


def install_command(extra: str) -> str:
    """Command such as `pip install 'ray>=2.43'`. Raises: ValueError for an extra that pyproject.toml does not have."""
    try:
        rows = requires(NAME) or []
    except PackageNotFoundError:  # sources that are not installed
        return f"pip install --no-build-isolation {shlex.quote(f'.[{extra}]')} in a checkout"
    pairs = [row.partition(";") for row in rows]
    needs = [need.strip() for need, _, marker in pairs if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    if not needs:
        raise ValueError(f"{NAME} has no extra {extra!r}")
    index = f" --extra-index-url {TORCH_CPU_INDEX}" if extra == "cpu" else ""
    return f"pip install {shlex.join(needs)}{index}"
