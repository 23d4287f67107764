"""Paths inside of a filesystem as programs give them."""

from __future__ import annotations

import errno
import os
from typing import Union

from ._path import Path

AnyPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]", Path]
#: A path of the host.
HostPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
BytesPath = Union[bytes, "os.PathLike[bytes]"]
TextPath = Union[str, "os.PathLike[str]", Path]

#: Errors of a path that leads nowhere, as a link may make it.
LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def encode(path: AnyPath) -> bytes:
    """The bytes of a path."""
    return bytes(path) if isinstance(path, Path) else os.fsencode(path)


def shown(path: AnyPath) -> str | bytes:
    """The path as `bytes` if it was given as `bytes`, else as `str`."""
    return str(path) if isinstance(path, Path) else os.fspath(path)
