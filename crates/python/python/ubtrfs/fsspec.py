"""A filesystem of fsspec: the protocol `btrfs`.

The storage is a path, or any file object that fsspec opens, so URLs chain: `btrfs://etc/hostname::s3://bucket/disk.img`.

>>> import fsspec, io, ubtrfs
>>> storage = io.BytesIO()
>>> with ubtrfs.make(storage, size=256 << 20) as image:
...     image.write_bytes("/hello.txt", b"hello")
>>> fs = fsspec.filesystem("btrfs", fo=storage)
>>> fs.ls("/", detail=False), fs.cat("/hello.txt")
(['/hello.txt'], b'hello')
>>> fs.close()
"""

from __future__ import annotations

import os
import stat as stat_module
from datetime import datetime, timezone
from typing import Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec import open as open_url
from fsspec.utils import stringify_path  # type: ignore[import-untyped]

from . import Filesystem
from . import open as open_image

__all__ = ["BtrfsFileSystem"]


class BtrfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a btrfs filesystem. All paths begin with `/`.

    Changes are durable after `sync` or `close`.
    """

    protocol = "btrfs"
    root_marker = "/"
    # Two instances must not open one image.
    cachable = False

    def __init__(
        self,
        fo: Any = None,
        mode: str = "r",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        subvol: str | None = None,
        options: str = "",
        memory: int | None = None,
        auto_mkdir: bool = False,
        **kwargs: Any,
    ) -> None:
        """Opens the storage `fo`: a path or URL, a seekable file object, a `Device`, or an open `Filesystem`.

        `mode` is `r` for reading only, or `r+`. `target_protocol` and `target_options` are fsspec's, for a path of another
        filesystem. `subvol`, `options` and `memory` are those of `ubtrfs.open`. With
        `auto_mkdir`, files that are made get the directories that are missing.
        """
        super().__init__(self, **kwargs)
        if mode not in ("r", "r+"):
            raise ValueError(f"mode is '{mode}'; give r or r+. The function ubtrfs.make makes a filesystem")
        if fo is None:
            raise ValueError("fo is missing: give the path of an image, a file object or a Filesystem")
        self.auto_mkdir = auto_mkdir
        self._opened: Any = None
        self._is_owner = not isinstance(fo, Filesystem)
        if isinstance(fo, Filesystem):
            self.image = fo
            return
        if isinstance(fo, (str, os.PathLike)) and (target_protocol is not None or "://" in str(fo)):
            self._opened = open_url(
                stringify_path(fo), mode=f"{mode}b", protocol=target_protocol, **(target_options or {})
            ).open()
            fo = self._opened
        try:
            self.image = open_image(fo, read_only=mode == "r", subvol=subvol, options=options, memory=memory)
        except BaseException:
            self._close_opened()
            raise

    def _close_opened(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def close(self) -> None:
        """Commits all changes, and closes the image. A `Filesystem` that the caller opened stays open."""
        try:
            if self._is_owner:
                self.image.close()
            else:
                self.image.sync()
        finally:
            self._close_opened()

    def sync(self) -> None:
        """Makes all changes so far durable."""
        self.image.sync()

    def __del__(self) -> None:
        if getattr(self, "_is_owner", False) and hasattr(self, "image"):
            self.close()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        path = path[len("btrfs://") :] if path.startswith("btrfs://") else path
        return "/" + path.strip("/")

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """The attributes of a file. A link has those of its target, and `islink` and `destination`."""
        return self._info(self._strip_protocol(path), True)

    def _info(self, path: str, follows: bool) -> dict[str, Any]:
        status = self.image.lstat(path)
        found: dict[str, Any] = {"name": path, "islink": stat_module.S_ISLNK(status.st_mode)}
        if found["islink"]:
            found["destination"] = self.image.readlink(path)
            if follows and self.image.exists(path):
                status = self.image.stat(path)
        kinds = {stat_module.S_IFREG: "file", stat_module.S_IFDIR: "directory", stat_module.S_IFLNK: "link"}
        found.update(
            size=status.st_size,
            type=kinds.get(stat_module.S_IFMT(status.st_mode), "other"),
            created=status.st_birthtime,
            mtime=status.st_mtime,
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            ino=status.st_ino,
            nlink=status.st_nlink,
            subvolume=status.st_dev,
        )
        return found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Lists a directory, or one file. Links in a directory are listed as links, so a walk does not follow them."""
        path = self._strip_protocol(path)
        if not self.image.isdir(path):
            found = self.info(path)
            return [found] if detail else [path]
        names = [path.rstrip("/") + "/" + name for name in self.image.listdir(path)]
        return [self._info(name, False) for name in names] if detail else names

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a path exists."""
        return self.image.exists(self._strip_protocol(path))

    def isdir(self, path: str) -> bool:
        """Whether a path leads to a directory."""
        return self.image.isdir(self._strip_protocol(path))

    def isfile(self, path: str) -> bool:
        """Whether a path leads to a file."""
        return self.image.isfile(self._strip_protocol(path))

    def created(self, path: str) -> datetime:
        """The time of creation."""
        return datetime.fromtimestamp(self.info(path)["created"], tz=timezone.utc)

    def modified(self, path: str) -> datetime:
        """The time of the last change of the content."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Makes a directory, and its missing parents."""
        path = self._strip_protocol(path)
        if create_parents:
            self.image.makedirs(path)
        else:
            self.image.mkdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory and its missing parents."""
        self.image.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self.image.rmdir(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Removes a file, a link or an empty directory."""
        path = self._strip_protocol(path)
        if self.image.isdir(path) and not self.image.islink(path):
            self.image.rmdir(path)
        else:
            self.image.remove(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes files, with `recursive` also directories with their content."""
        for one in [path] if isinstance(path, (str, os.PathLike)) else path:
            name = self._strip_protocol(one)
            if recursive and maxdepth is None and self.image.isdir(name) and not self.image.islink(name):
                self.image.rmtree(name)
            else:
                super().rm(name, recursive=recursive, maxdepth=maxdepth)

    def mv(self, path1: str, path2: str, recursive: bool = True, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Renames a file or directory; copies it into another subvolume."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.image.isdir(target) and not self.image.isdir(source):
            target = f"{target}/{source.rpartition('/')[2]}"
        try:
            self.image.rename(source, target)
        except OSError as error:
            # EXDEV.
            if error.errno != 18:
                raise
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copies a file. The copy shares the data of the original until one of them changes."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.image.isdir(source):
            self.image.makedirs(target, exist_ok=True)
            return
        self.image.makedirs(self._parent(target), exist_ok=True)
        self.image.reflink(source, target)

    def _make_parent(self, path: str) -> None:
        if self.auto_mkdir:
            self.image.makedirs(self._parent(path), exist_ok=True)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Makes an empty file, or truncates an existing one; without `truncate`, sets its times to now."""
        path = self._strip_protocol(path)
        if truncate or not self.image.exists(path):
            self._make_parent(path)
            self.image.write_bytes(path, b"")
        else:
            self.image.utime(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The content of a file, or a part of it."""
        if start is None and end is None:
            return self.image.read_bytes(self._strip_protocol(path))
        content: bytes = super().cat_file(path, start, end, **kwargs)
        return content

    def get_file(self, rpath: str, lpath: Any, callback: Any = None, outfile: Any = None, **kwargs: Any) -> None:
        """Copies a file to the host."""
        source = self._strip_protocol(rpath)
        if self.image.isdir(source):
            if outfile is None:
                os.makedirs(lpath, exist_ok=True)
            return
        with self.image.open(source, "rb") as file:
            if callback is not None:
                callback.set_size(self.image.stat(source).st_size)
            if outfile is None:
                os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
            out = open(lpath, "wb") if outfile is None else outfile
            try:
                while data := file.read(self.blocksize):
                    out.write(data)
                    if callback is not None:
                        callback.relative_update(len(data))
            finally:
                if outfile is None:
                    out.close()

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not autocommit:
            raise NotImplementedError("fsspec's transactions are not supported; use ubtrfs.Filesystem.transaction")
        path = self._strip_protocol(path)
        if mode[:1] != "r":
            self._make_parent(path)
        return self.image.open(path, mode if "b" in mode else f"{mode}b")
