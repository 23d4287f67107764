"""The exceptions of this package."""

from __future__ import annotations

from ._ubtrfs import CorruptionError

__all__ = ["CorruptionError"]
