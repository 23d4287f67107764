"""An open filesystem, and everything that works by path."""

from __future__ import annotations

import atexit
import errno
import os
import posixpath
import stat as stat_module
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, overload

from . import _ubtrfs
from ._entries import DirEntry
from ._files import open_file, wrap
from ._manage import Manage
from ._names import LEADS_NOWHERE, AnyPath, BytesPath, HostPath, TextPath, encode, shown
from ._path import Path
from ._reports import CopyReport, Subvolume, Usage
from ._streams import Progress, ReceiveReport, ReceiveStream, SendStream, receive_all
from ._ubtrfs import Stat

__all__ = ["Filesystem"]

#: Open filesystems. They are closed before the interpreter ends.
_open: weakref.WeakSet[Filesystem] = weakref.WeakSet()


def _close_all() -> None:
    for fs in list(_open):
        try:
            fs.close()
        except BaseException:
            # The others are closed nevertheless.
            traceback.print_exc()


def _forget_all() -> None:
    # A process that was forked has no thread of the engine, and the filesystems belong to its parent.
    for fs in list(_open):
        fs.closed = True
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)


class Filesystem:
    """An open filesystem, from `open`, `make` or `make_in_memory`. All threads may use it.

    A change is durable after `sync` or `close`. A `with` block closes the filesystem at its end. Permissions are not
    checked, and new files belong to root; see `with_caller`.
    """

    def __init__(self, fs: _ubtrfs.Filesystem, *, _is_owner: bool = True) -> None:
        """Wraps an open filesystem."""
        self._fs = fs
        self._is_owner = _is_owner
        self.closed = False
        if _is_owner:
            _open.add(self)

    def __enter__(self) -> Filesystem:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the filesystem. An error of closing does not hide an exception of the block."""
        try:
            self.close()
        except Exception:
            if kind is None:
                raise

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self._is_owner:
            warnings.warn(f"unclosed filesystem {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<ubtrfs.Filesystem{' closed' if self.closed else ''}>"

    def close(self) -> None:
        """Commits all changes and closes the filesystem. Open files can no longer be used."""
        if self.closed:
            return
        self.closed = True
        _open.discard(self)
        if self._is_owner:
            self._fs.close()
        else:
            self._fs.forget()

    def sync(self) -> None:
        """Makes all changes so far durable."""
        self._fs.sync()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the changes of a `with` block durable together, all or none.

        After an exception in the block, the devices keep the state before it, and the filesystem takes no more changes:
        close it, and open it again. It goes on if the block changed nothing. `sync`, and making subvolumes and snapshots,
        fail in the block.
        """
        self._fs.begin()
        try:
            yield
            self._fs.commit()
        except BaseException:
            self._fs.abort()
            raise

    def with_caller(self, uid: int, gid: int, umask: int = 0o022) -> Filesystem:
        """A handle whose new files belong to this user.

        >>> import ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> fs.with_caller(1000, 1000, 0o077).write_bytes("/notes", b"private")
        >>> oct(fs.stat("/notes").st_mode), fs.stat("/notes").st_uid
        ('0o100600', 1000)
        >>> fs.close()
        """
        return Filesystem(self._fs.with_caller(uid, gid, umask), _is_owner=False)

    @property
    def label(self) -> str:
        """The label; empty if there is none."""
        return os.fsdecode(self._fs.label())

    @label.setter
    def label(self, label: str | bytes) -> None:
        self._fs.set_label(os.fsencode(label))

    @property
    def manage(self) -> Manage:
        """Balance, scrub, devices, quotas, space."""
        return Manage(self._fs)

    @property
    def read_only_reason(self) -> str | None:
        """Why the filesystem is read-only, or `None`."""
        return self._fs.read_only_reason()

    def usage(self) -> Usage:
        """The space of the filesystem."""
        return Usage(*self._fs.usage())

    def statvfs(self, path: AnyPath = "/") -> os.statvfs_result:
        """The space and the limits of the filesystem, as `os.statvfs` tells them. btrfs has no number of inodes.

        >>> import ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs:
        ...     status = fs.statvfs()
        ...     status.f_blocks * status.f_frsize == 256 << 20, status.f_namemax
        (True, 255)
        """
        self.stat(path)
        size, blocks, free, available, longest, number = self._fs.statvfs()
        flags = os.ST_RDONLY if self.read_only_reason is not None else 0
        return os.statvfs_result((size, size, blocks, free, available, 0, 0, 0, flags, longest, number))

    def path(self, path: AnyPath = "/") -> Path:
        """A path with the interface of `pathlib`."""
        return Path(self, path)

    # Files

    def open(
        self,
        path: AnyPath,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        permissions: int | None = None,
    ) -> IO[Any]:
        """Opens a file as the built-in `open` does. `permissions` are those of a new file, by default 0644.

        >>> import ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> with fs.open("/log", "a") as log:
        ...     print("started", file=log)
        >>> with fs.open("/log") as log:
        ...     list(log)
        ['started\\n']
        >>> fs.close()
        """
        raw, text = open_file(self._fs, encode(path), shown(path), mode, permissions)
        return wrap(raw, text, buffering, encoding, errors, newline)

    def read_bytes(self, path: AnyPath) -> bytes:
        """The whole content of a file."""
        return self._fs.read_bytes(encode(path))

    def write_bytes(self, path: AnyPath, data: bytes) -> None:
        """Replaces the content of a file, or makes the file."""
        self._fs.write_bytes(encode(path), data if type(data) is bytes else memoryview(data).tobytes())

    def truncate(self, path: AnyPath, size: int) -> None:
        """Truncates a file, or extends it by a hole."""
        raw, _ = open_file(self._fs, encode(path), shown(path), "r+b", None)
        with raw:
            raw.truncate(size)

    def reflink(self, source: AnyPath, target: AnyPath) -> None:
        """Makes `target` a copy of a file that shares its data until one of them changes."""
        self._fs.reflink(encode(source), encode(target))

    # Directories

    @overload
    def listdir(self, path: BytesPath) -> list[bytes]: ...
    @overload
    def listdir(self, path: TextPath = "/") -> list[str]: ...
    def listdir(self, path: AnyPath = "/") -> list[Any]:
        """The names in a directory: `bytes` if the path is `bytes`, else `str`."""
        entries = self._fs.list_dir(encode(path))
        if isinstance(shown(path), bytes):
            return [name for name, _, _ in entries]
        return [os.fsdecode(name) for name, _, _ in entries]

    @overload
    def scandir(self, path: BytesPath) -> Iterator[DirEntry[bytes]]: ...
    @overload
    def scandir(self, path: TextPath = "/") -> Iterator[DirEntry[str]]: ...
    def scandir(self, path: AnyPath = "/") -> Iterator[Any]:
        """The entries of a directory, in the order of their creation.

        >>> import ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> fs.create_subvolume("/home")
        >>> fs.symlink("home", "/link")
        >>> [(entry.name, entry.is_dir(), entry.is_subvolume()) for entry in fs.scandir("/")]
        [('home', True, True), ('link', True, False)]
        >>> fs.close()
        """
        top = shown(path)
        for name, bits, is_subvolume in self._fs.list_dir(encode(path)):
            if isinstance(top, bytes):
                yield DirEntry(self, name, posixpath.join(top, name), bits, is_subvolume)
            else:
                text = os.fsdecode(name)
                yield DirEntry(self, text, posixpath.join(top, text), bits, is_subvolume)

    @overload
    def walk(
        self,
        top: BytesPath,
        topdown: bool = True,
        onerror: Callable[[OSError], object] | None = None,
        followlinks: bool = False,
    ) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]: ...
    @overload
    def walk(
        self,
        top: TextPath = "/",
        topdown: bool = True,
        onerror: Callable[[OSError], object] | None = None,
        followlinks: bool = False,
    ) -> Iterator[tuple[str, list[str], list[str]]]: ...
    def walk(
        self,
        top: AnyPath = "/",
        topdown: bool = True,
        onerror: Callable[[OSError], object] | None = None,
        followlinks: bool = False,
    ) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Walks a directory as `os.walk` does, also into subvolumes.

        >>> import ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> fs.makedirs("/a/b")
        >>> fs.write_bytes("/a/b/f", b"")
        >>> list(fs.walk("/"))
        [('/', ['a'], []), ('/a', ['b'], []), ('/a/b', [], ['f'])]
        >>> fs.close()
        """
        # Directories that are to be visited, and, bottom up, results that wait for their directories.
        stack: list[Any] = [shown(top)]
        while stack:
            current: Any = stack.pop()
            if isinstance(current, tuple):
                yield current
                continue
            dirs: list[Any] = []
            files: list[Any] = []
            try:
                for entry in self.scandir(current):
                    # As in os.walk, a link to a directory is listed as a directory. Content of an image makes a link, so
                    # a link that cannot be followed hides nothing else.
                    try:
                        is_dir = entry.is_dir()
                    except OSError:
                        is_dir = False
                    (dirs if is_dir else files).append(entry.name)
            except OSError as error:
                if onerror is not None:
                    onerror(error)
                continue
            if topdown:
                yield current, dirs, files
            else:
                stack.append((current, dirs, files))
            for name in reversed(dirs):
                path: Any = posixpath.join(current, name)
                if followlinks or not self.islink(path):
                    stack.append(path)

    def mkdir(self, path: AnyPath, mode: int | None = None) -> None:
        """Makes a directory, by default with the permissions 0755."""
        name = encode(path)
        self._fs.mkdir(name)
        if mode is not None:
            self._fs.chmod(name, mode)

    def makedirs(self, path: AnyPath, mode: int | None = None, exist_ok: bool = False) -> None:
        """Makes a directory and its missing parents."""
        name = encode(path)
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        for end in range(1, len(parts)):
            parent = b"/" + b"/".join(parts[:end])
            try:
                self._fs.mkdir(parent)
            except FileExistsError:
                pass
        try:
            if not parts:
                raise FileExistsError(17, "cannot make directory: file exists", os.fsdecode(name))
            self.mkdir(name, mode)
        except FileExistsError:
            if not exist_ok or not self.isdir(name):
                raise

    def remove(self, path: AnyPath) -> None:
        """Removes a file or a link."""
        self._fs.remove(encode(path))

    unlink = remove

    def rmdir(self, path: AnyPath) -> None:
        """Removes an empty directory."""
        self._fs.rmdir(encode(path))

    def rmtree(self, path: AnyPath) -> None:
        """Removes a directory with its content. Subvolumes in it must be deleted before.

        The root directory cannot be removed, so it is refused before anything in it is removed.
        """
        name = encode(path)
        found, root = self.lstat(name), self.lstat(b"/")
        if (found.st_dev, found.st_ino) == (root.st_dev, root.st_ino):
            reason = "cannot remove the root directory of the filesystem; remove what is in it"
            raise OSError(errno.EBUSY, reason, os.fsdecode(name))
        if name.rstrip(b"/").rpartition(b"/")[2] in (b".", b".."):
            raise OSError(errno.EINVAL, "cannot remove a directory by '.' or '..'; give its name", os.fsdecode(name))
        self._fs.rmtree(name)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        """Renames a file or directory, and replaces an existing target."""
        self._fs.rename(encode(source), encode(target))

    replace = rename

    def link(self, source: AnyPath, target: AnyPath) -> None:
        """Makes another name for a file."""
        self._fs.link(encode(source), encode(target))

    def symlink(self, target: AnyPath, path: AnyPath) -> None:
        """Makes `path` a symbolic link to `target`, which can be any text."""
        text = encode(target)
        if b"\0" in text:
            raise ValueError("embedded null byte")
        self._fs.symlink(text, encode(path))

    def mknod(self, path: AnyPath, mode: int = 0o600, device: int = 0) -> None:
        """Makes a file, a FIFO, a socket or a device file, as `os.mknod` does. `device` is that of `os.makedev`.

        >>> import os, stat, ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs:
        ...     fs.mknod("/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        ...     status = fs.stat("/null")
        ...     stat.filemode(status.st_mode), status.device_number
        ('crw-rw-rw-', (1, 3))
        """
        if stat_module.S_IFMT(mode) in (0, stat_module.S_IFREG):
            self.open(path, "xb", permissions=stat_module.S_IMODE(mode)).close()
        else:
            self._fs.mknod(encode(path), mode, (os.major(device), os.minor(device)))

    def mkfifo(self, path: AnyPath, mode: int = 0o644) -> None:
        """Makes a FIFO, which programs use through a mount."""
        self.mknod(path, stat_module.S_IFIFO | stat_module.S_IMODE(mode))

    @overload
    def readlink(self, path: BytesPath) -> bytes: ...
    @overload
    def readlink(self, path: TextPath) -> str: ...
    def readlink(self, path: AnyPath) -> Any:
        """The target of a symbolic link."""
        target = self._fs.readlink(encode(path))
        return target if isinstance(shown(path), bytes) else os.fsdecode(target)

    # Copies from and to the host

    def copy_from_host(
        self, source: HostPath, path: AnyPath, *, keep: bool = True, owner: tuple[int, int] | None = None
    ) -> CopyReport:
        """Copies a file or directory of the host, with everything below it, to `path`.

        With `keep`, the copies keep owners, modes, times, extended attributes and hard links, as with `cp -a`. `owner` is
        the user and the group of all copies instead. A directory that exists at `path` is completed: other files in it stay.
        A file that cannot be copied is in the `failures` of the report.

        >>> import pathlib, tempfile, ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "f").write_text("text")
        ...     report = fs.copy_from_host(folder, "/copy", owner=(0, 0))
        >>> report.files, report.failures, fs.read_bytes("/copy/f")
        (1, [], b'text')
        >>> fs.close()
        """
        return CopyReport(*self._fs.copy_from_host(os.fsencode(source), encode(path), keep, owner))

    def copy_to_host(
        self, path: AnyPath, target: HostPath, *, keep: bool = True, owner: tuple[int, int] | None = None
    ) -> CopyReport:
        """Copies a file or directory, with everything below it, to `target` on the host; otherwise as `copy_from_host`.

        Nothing outside of `target` is changed. With root's rights, set-user-id files and device files of an image that you do
        not trust are made, too: copy to where other users cannot reach them, or give an `owner`.
        """
        return CopyReport(*self._fs.copy_to_host(encode(path), os.fsencode(target), keep, owner))

    # Attributes

    def stat(self, path: AnyPath, *, follow_symlinks: bool = True) -> Stat:
        """The attributes of a file. `st_dev` is the id of its subvolume."""
        return self._fs.stat(encode(path), follow_symlinks)

    def lstat(self, path: AnyPath) -> Stat:
        """The attributes of a file, or of a link itself."""
        return self._fs.stat(encode(path), False)

    def _kind(self, path: AnyPath, follow: bool = True) -> int:
        """The type bits of the mode; 0 if the path leads nowhere."""
        try:
            return stat_module.S_IFMT(self._fs.stat(encode(path), follow).st_mode)
        except OSError as error:
            if error.errno not in LEADS_NOWHERE:
                raise
            return 0

    def exists(self, path: AnyPath) -> bool:
        """Whether a path exists. A link that leads nowhere does not."""
        return self._kind(path) != 0

    def lexists(self, path: AnyPath) -> bool:
        """Whether a path exists, also as a link that leads nowhere."""
        return self._kind(path, False) != 0

    def isdir(self, path: AnyPath) -> bool:
        """Whether a path leads to a directory."""
        return self._kind(path) == stat_module.S_IFDIR

    def isfile(self, path: AnyPath) -> bool:
        """Whether a path leads to a regular file."""
        return self._kind(path) == stat_module.S_IFREG

    def islink(self, path: AnyPath) -> bool:
        """Whether a path is a symbolic link."""
        return self._kind(path, False) == stat_module.S_IFLNK

    def chmod(self, path: AnyPath, mode: int) -> None:
        """Sets the permissions; links are followed."""
        self._fs.chmod(encode(path), mode & 0o7777)

    def chown(self, path: AnyPath, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """Sets owner and group; -1 leaves one unchanged. This may clear set-id bits, so call `chmod` afterwards."""
        self._fs.chown(encode(path), None if uid == -1 else uid, None if gid == -1 else gid, follow_symlinks)

    def utime(
        self,
        path: AnyPath,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        created_ns: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Sets the times of the last access and of the last change, as `os.utime` does, or the time of creation.

        >>> import ubtrfs
        >>> fs = ubtrfs.make_in_memory(256 << 20)
        >>> fs.write_bytes("/f", b"")
        >>> fs.utime("/f", (-1.5, 10), created_ns=5)
        >>> status = fs.stat("/f")
        >>> status.st_atime_ns, status.st_mtime, status.st_birthtime_ns
        (-1500000000, 10.0, 5)
        >>> fs.close()
        """
        if times is not None and ns is not None:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")
        if times is not None:
            ns = (round(times[0] * 1_000_000_000), round(times[1] * 1_000_000_000))
        elif ns is None and created_ns is None:
            now = time.time_ns()
            ns = (now, now)
        self._fs.utime(
            encode(path),
            accessed=None if ns is None else divmod(ns[0], 1_000_000_000),
            modified=None if ns is None else divmod(ns[1], 1_000_000_000),
            created=None if created_ns is None else divmod(created_ns, 1_000_000_000),
            follow=follow_symlinks,
        )

    def getxattr(self, path: AnyPath, attribute: str | bytes) -> bytes:
        """The value of an extended attribute. Links are not followed."""
        value = self._fs.getxattr(encode(path), os.fsencode(attribute))
        if value is None:
            name = os.fsdecode(attribute)
            raise OSError(errno.ENODATA, f"cannot read the attribute '{name}': no such attribute", os.fsdecode(encode(path)))
        return value

    def listxattr(self, path: AnyPath) -> list[str]:
        """The names of all extended attributes. Links are not followed."""
        return [os.fsdecode(name) for name in self._fs.listxattr(encode(path))]

    def setxattr(self, path: AnyPath, attribute: str | bytes, value: bytes) -> None:
        """Sets an extended attribute, for example `user.color`. Links are not followed."""
        self._fs.setxattr(encode(path), os.fsencode(attribute), value)

    def removexattr(self, path: AnyPath, attribute: str | bytes) -> None:
        """Removes an extended attribute. Links are not followed."""
        self._fs.removexattr(encode(path), os.fsencode(attribute))

    # Subvolumes

    def create_subvolume(self, path: AnyPath) -> None:
        """Makes an empty subvolume, which is durable on return."""
        self._fs.create_subvolume(encode(path))

    def snapshot(self, source: AnyPath, path: AnyPath, *, read_only: bool = False) -> None:
        """Makes a snapshot of the subvolume `source`, which is durable on return."""
        self._fs.snapshot(encode(source), encode(path), read_only)

    def delete_subvolume(self, path: AnyPath) -> None:
        """Deletes a subvolume or snapshot with its content."""
        self._fs.delete_subvolume(encode(path))

    def set_read_only(self, path: AnyPath, read_only: bool = True) -> None:
        """Makes a subvolume read-only, or writable again."""
        self._fs.set_read_only(encode(path), read_only)

    def subvolumes(self) -> list[Subvolume]:
        """All subvolumes of the filesystem, also outside of the opened one, in the order of their ids."""
        return [Subvolume._of(words) for words in self._fs.subvolumes()]

    def subvolume(self, path: AnyPath) -> Subvolume:
        """The description of the subvolume at `path`."""
        return Subvolume._of(self._fs.subvolume(encode(path)))

    def default_subvolume(self) -> int:
        """The id of the subvolume that is opened if none is named."""
        return self._fs.default_subvolume()

    def set_default_subvolume(self, path: AnyPath) -> None:
        """Sets the subvolume that is opened if none is named."""
        self._fs.set_default_subvolume(encode(path))

    def is_subvolume(self, path: AnyPath) -> bool:
        """Whether `path` is the root of a subvolume."""
        try:
            status = self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        # The inode number of the root of every subvolume.
        return stat_module.S_ISDIR(status.st_mode) and status.st_ino == 256

    # Streams

    def send(
        self,
        path: AnyPath,
        *,
        parent: AnyPath | None = None,
        clone_sources: Sequence[AnyPath] = (),
        version: int = 1,
        compressed: bool = False,
        no_data: bool = False,
        progress: Progress = None,
    ) -> SendStream:
        """A readable file object: the read-only subvolume at `path` as a stream for `receive` or `btrfs receive`.

        With `parent`, the stream is the difference to this read-only subvolume, which the receiver must have. `compressed`
        keeps compressed data compressed, and needs version 2. `progress` is called with the number of bytes so far.

        >>> import ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs, ubtrfs.make_in_memory(256 << 20) as backup:
        ...     fs.create_subvolume("/data")
        ...     fs.write_bytes("/data/f", b"text")
        ...     fs.snapshot("/data", "/monday", read_only=True)
        ...     with fs.send("/monday") as stream:
        ...         report = backup.receive(stream)
        ...     [subvolume.path for subvolume in report.subvolumes], backup.read_bytes("/monday/f")
        (['monday'], b'text')
        """
        send = self._fs.send(
            encode(path),
            parent=None if parent is None else encode(parent),
            clone_sources=[encode(source) for source in clone_sources],
            version=version,
            compressed=compressed,
            no_data=no_data,
        )
        return SendStream(send, progress)

    def receiver(
        self,
        to: AnyPath = "/",
        *,
        max_errors: int = 1,
        keep: bool = False,
        verify: bool = False,
        force_decompress: bool = False,
        progress: Progress = None,
    ) -> ReceiveStream:
        """A writable file object: the stream that is written makes its subvolumes in the directory `to`.

        `max_errors` is the number of failed commands at which the receive fails; 0 means never. `keep` keeps an incomplete
        subvolume, so that a receive of the same stream resumes it. `verify` reads everything again and compares it.
        """
        receive = self._fs.receive(
            encode(to), max_errors=max_errors, keep=keep, verify=verify, force_decompress=force_decompress
        )
        return ReceiveStream(receive, progress)

    def receive(self, stream: Any, to: AnyPath = "/", **options: Any) -> ReceiveReport:
        """Receives everything that a file object has. The options are those of `receiver`."""
        return receive_all(stream, self.receiver(to, **options))
