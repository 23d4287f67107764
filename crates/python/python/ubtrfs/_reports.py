"""Descriptions of subvolumes, of the space, and of what a check found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from . import _ubtrfs

__all__ = ["CheckReport", "CopyReport", "Problem", "Subvolume", "Usage"]


@dataclass(frozen=True)
class Usage:
    """The space of a filesystem in bytes."""

    total: int
    free: int
    available: int


@dataclass(frozen=True)
class CopyReport:
    """What a copy from or to the host made."""

    files: int
    #: Also those that existed.
    directories: int
    symlinks: int
    #: Further names of files that were copied.
    hard_links: int
    special_files: int
    #: Of file data, without holes.
    bytes: int
    #: Files that were not copied, or not with all attributes: the reasons.
    failures: list[str]


@dataclass(frozen=True)
class Subvolume:
    """A subvolume or snapshot."""

    id: int
    #: From the top level, without a leading slash; empty for the top level itself.
    path: str
    parent_id: int | None
    read_only: bool
    uuid: UUID
    #: The subvolume that this one is a snapshot of.
    parent_uuid: UUID | None
    #: The subvolume at the sender, if this one was received.
    received_uuid: UUID | None
    generation: int
    #: Nanoseconds since 1970.
    created_ns: int

    @classmethod
    def _of(cls, words: _ubtrfs._Subvolume) -> Subvolume:
        number, path, parent, read_only, own, parent_uuid, received, generation, created = words
        return cls(
            number,
            os.fsdecode(path),
            parent,
            read_only,
            UUID(own),
            UUID(parent_uuid) if parent_uuid else None,
            UUID(received) if received else None,
            generation,
            created,
        )


@dataclass(frozen=True)
class Problem:
    """A finding of `check`."""

    code: str
    #: False for a warning.
    is_damage: bool
    text: str


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`."""

    is_clean: bool
    #: Whether all parts of the check ran.
    is_complete: bool
    problems: list[Problem]
