"""The entries of directories."""

from __future__ import annotations

import stat as stat_module
from typing import TYPE_CHECKING, AnyStr, Generic

from ._names import LEADS_NOWHERE

if TYPE_CHECKING:
    from ._filesystem import Filesystem
    from ._ubtrfs import Stat

__all__ = ["DirEntry"]


class DirEntry(Generic[AnyStr]):
    """An entry of a directory, from `Filesystem.scandir`. The interface is that of `os.DirEntry`."""

    __slots__ = ("_fs", "_is_subvolume", "name", "path", "type_bits")

    #: The name, as `str` if the directory was given as `str`.
    name: AnyStr
    #: The path of the directory with the name.
    path: AnyStr
    #: The type bits of the mode, as in `stat.S_IFREG`.
    type_bits: int

    def __init__(self, fs: Filesystem, name: AnyStr, path: AnyStr, type_bits: int, is_subvolume: bool) -> None:
        """Made by `scandir`."""
        self._fs = fs
        self.name = name
        self.path = path
        self.type_bits = type_bits
        self._is_subvolume = is_subvolume

    def __fspath__(self) -> AnyStr:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def _is(self, kind: int, follow_symlinks: bool) -> bool:
        if follow_symlinks and stat_module.S_ISLNK(self.type_bits):
            try:
                return stat_module.S_IFMT(self.stat().st_mode) == kind
            except OSError as error:
                if error.errno not in LEADS_NOWHERE:
                    raise
                return False
        return self.type_bits == kind

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a directory, or a link to one."""
        return self._is(stat_module.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a regular file, or a link to one."""
        return self._is(stat_module.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Whether the entry is a symbolic link."""
        return stat_module.S_ISLNK(self.type_bits)

    def is_subvolume(self) -> bool:
        """Whether the entry is a subvolume."""
        return self._is_subvolume

    def inode(self) -> int:
        """The inode number, which is unique in its subvolume."""
        return self.stat(follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        """The attributes."""
        return self._fs.stat(self.path, follow_symlinks=follow_symlinks)
