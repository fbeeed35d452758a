"""How code in an engine core calls its worker."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore


def call_worker(core: EngineCore, method: str, *args: Any) -> Any:
    """Call a method of every worker; returns the answer of the one whose outputs are read, the others say None."""
    return next((result for result in core.collective_rpc(method, args=args) if result is not None), None)
