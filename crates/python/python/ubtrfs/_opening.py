"""Opening, making and checking filesystems."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from . import _ubtrfs
from ._devices import host_devices, host_paths
from ._filesystem import Filesystem
from ._reports import CheckReport, Problem

__all__ = ["check", "make", "make_in_memory", "open"]


def _open_words(
    options: str,
    read_only: bool,
    subvol: str | bytes | None,
    devices: Sequence[Any],
    memory: int | None,
) -> dict[str, Any]:
    return {
        "options": options,
        "read_only": read_only,
        "subvol": None if subvol is None else os.fsencode(subvol),
        "devices": [os.fsencode(path) for path in devices],
        "memory": memory,
    }


def open(
    target: Any,
    *,
    read_only: bool = False,
    subvol: str | bytes | None = None,
    options: str = "",
    devices: Sequence[Any] = (),
    memory: int | None = None,
) -> Filesystem:
    """Opens the filesystem on an image file or block device, a file object, or a `Device`.

    `target` may be a list if the filesystem has several devices. The others are also found beside the first one, or named
    by `devices`. `options` are mount options, as in `compress=zstd,noatime`. `subvol` is the subvolume to show as the root.
    `memory` limits the memory for caches and dirty data, in bytes.
    """
    paths = host_paths(target)
    if paths is not None:
        words = _open_words(options, read_only, subvol, [*paths[1:], *devices], memory)
        return Filesystem(_ubtrfs.open_paths(paths[0], words))
    if devices:
        raise TypeError("give all devices in the list; 'devices' is for paths")
    words = _open_words(options, read_only, subvol, (), memory)
    return Filesystem(_ubtrfs.open_objects(host_devices(target), words))


def make(
    target: Any,
    size: int | None = None,
    *,
    label: str | bytes = "",
    uuid: str | UUID | None = None,
    nodesize: int = 16384,
    sectorsize: int = 4096,
    csum: str = "crc32c",
    data: str | None = None,
    metadata: str | None = None,
    mixed: bool = False,
    block_group_tree: bool = False,
    root_owner: tuple[int, int] = (0, 0),
    created_ns: int | None = None,
    force: bool = False,
    options: str = "",
    memory: int | None = None,
) -> Filesystem:
    """Makes an empty filesystem, and opens it.

    With `size` in bytes, a path names a new image file, which is sparse. Without, it names an existing file or block device.
    A file object is extended to `size`. `target` may be a list of devices. `data` and `metadata` are profiles: single, dup,
    raid0, raid1, raid1c3, raid1c4 or raid10. `csum` is crc32c, xxhash, sha256 or blake2. `force` overwrites existing content.
    `options` and `memory` are those of `open`.
    """
    words = {
        "label": os.fsencode(label),
        "uuid": None if uuid is None else str(uuid),
        "nodesize": nodesize,
        "sectorsize": sectorsize,
        "csum": csum,
        "data": data,
        "metadata": metadata,
        "mixed": mixed,
        "block_group_tree": block_group_tree,
        "root_owner": root_owner,
        "force": force,
        "time": None if created_ns is None else divmod(created_ns, 1_000_000_000),
    }
    how = _open_words(options, False, None, (), memory)
    paths = host_paths(target)
    if paths is not None:
        return Filesystem(_ubtrfs.make_paths(paths, size, words, how))
    return Filesystem(_ubtrfs.make_objects(host_devices(target, size), words, how))


def make_in_memory(size: int = 1 << 30) -> Filesystem:
    """Makes a filesystem in memory, for tests. It disappears when it is closed. Memory is taken as it is written to."""
    return Filesystem(_ubtrfs.make_in_memory(size))


def check(target: Any, *, data_csums: bool = False) -> CheckReport:
    """Checks a filesystem that is not open, without changing it. With `data_csums`, all data is read too.

    >>> import io
    >>> storage = io.BytesIO()
    >>> make(storage, size=256 << 20).close()
    >>> check(storage).is_clean
    True
    """
    paths = host_paths(target)
    if paths is not None:
        clean, complete, problems = _ubtrfs.check_paths(paths, data_csums)
    else:
        clean, complete, problems = _ubtrfs.check_objects(host_devices(target), data_csums)
    return CheckReport(clean, complete, [Problem(*problem) for problem in problems])
