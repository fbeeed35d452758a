"""For verl on an emulated device: in place of its worker extension, which changes a model that is not there."""

from __future__ import annotations

from typing import Any


class EmulatedExtension:
    def monkey_patch_model(self, **_: Any) -> None:
        """There is no model."""
