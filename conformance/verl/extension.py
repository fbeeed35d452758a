"""Replaces verl's worker extension on an emulated device, where there is no model to change."""

from __future__ import annotations

from typing import Any


class EmulatedExtension:
    def monkey_patch_model(self, **_: Any) -> None:
        """Do nothing: there is no model."""
