"""File objects of files in a filesystem, with the interface of `io`."""

from __future__ import annotations

import io
import os
from typing import IO, TYPE_CHECKING, Any

from ._streams import Progress

if TYPE_CHECKING:
    from . import _ubtrfs

__all__ = ["RawFile", "open_file", "parse_mode"]

#: Bytes of a buffered file's buffer.
BUFFER_SIZE = 128 << 10


def parse_mode(mode: str) -> tuple[str, bool, bool]:
    """Splits a mode into its first letter, whether it has `+`, and whether it is a text mode."""
    letters = set(mode)
    if not isinstance(mode, str) or letters - set("rwaxbt+") or len(mode) > len(letters):
        raise ValueError(f"invalid mode: {mode!r}")
    kinds = letters & set("rwax")
    if len(kinds) != 1:
        raise ValueError("must have exactly one of create/read/write/append mode")
    if letters >= {"b", "t"}:
        raise ValueError("can't have text and binary mode at once")
    return kinds.pop(), "+" in letters, "b" not in letters


class RawFile(io.RawIOBase):
    """An open file without a buffer. Every read and write goes to the filesystem.

    >>> import ubtrfs
    >>> with ubtrfs.make_in_memory(256 << 20) as fs:
    ...     with fs.open("/f", "w+b", buffering=0) as file:
    ...         _ = file.write(b"one two")
    ...         _ = file.seek(4)
    ...         file.read(3)
    b'two'
    """

    def __init__(self, handle: _ubtrfs.File, name: str | bytes, mode: str, kind: str, updates: bool) -> None:
        """Wraps an open file; `kind` is the first letter of a mode."""
        super().__init__()
        self._handle = handle
        self._position = 0
        self._reads = kind == "r" or updates
        self._writes = kind != "r" or updates
        self._appends = kind == "a"
        self.name = name
        self.mode = mode
        if self._appends:
            self._position = handle.size()

    def __repr__(self) -> str:
        return f"<ubtrfs.RawFile name={self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"

    def _check(self, allowed: bool = True, what: str = "") -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        if not allowed:
            raise io.UnsupportedOperation(f"File not open for {what}")

    def readable(self) -> bool:
        """Whether the file can be read."""
        self._check()
        return self._reads

    def writable(self) -> bool:
        """Whether the file can be written."""
        self._check()
        return self._writes

    def seekable(self) -> bool:
        """Always true."""
        self._check()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads up to `size` bytes, or everything up to the end."""
        self._check(self._reads, "reading")
        data = self._handle.read_at(self._position, (1 << 63) - 1 if size is None or size < 0 else size)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """Reads everything up to the end."""
        return self.read(-1)

    def readinto(self, buffer: Any, /) -> int:
        """Reads into `buffer`, and returns the number of bytes."""
        self._check(self._reads, "reading")
        view = memoryview(buffer).cast("B")
        data = self._handle.read_at(self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: Any, /) -> int:
        """Writes all of `data`: at the position, or at the end of a file that is open for appending."""
        self._check(self._writes, "writing")
        if isinstance(data, str):
            raise TypeError("a bytes-like object is required, not 'str'")
        content = data if type(data) is bytes else memoryview(data).tobytes()
        if not content:
            # As on Linux, the position does not move, also not to the end of a file that is open for appending.
            return 0
        if self._appends:
            self._position = self._handle.append(content)
        else:
            self._handle.write_at(self._position, content)
            self._position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves the position. `SEEK_DATA` and `SEEK_HOLE` are understood too."""
        self._check()
        if whence == os.SEEK_SET:
            position = offset
        elif whence == os.SEEK_CUR:
            position = self._position + offset
        elif whence == os.SEEK_END:
            position = self._handle.size() + offset
        elif whence in (os.SEEK_DATA, os.SEEK_HOLE):
            position = self._next(offset, whence)
        else:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1, 2, SEEK_DATA or SEEK_HOLE)")
        if position < 0:
            raise OSError(22, "Invalid argument: the position is negative")
        self._position = position
        return position

    def _next(self, offset: int, whence: int) -> int:
        size = self._handle.size()
        if not 0 <= offset < size:
            raise OSError(6, "No such device or address: the offset is outside of the file")
        found = self._handle.next_data(offset)
        if whence == os.SEEK_HOLE:
            return found[1] if found is not None and found[0] == offset else offset
        if found is None:
            raise OSError(6, "No such device or address: no data after the offset")
        return found[0]

    def tell(self) -> int:
        """The position."""
        self._check()
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        """Truncates the file to `size` bytes, by default to the position, or extends it by a hole."""
        self._check(self._writes, "writing")
        size = self._position if size is None else size
        if size < 0:
            raise OSError(22, "Invalid argument: the size is negative")
        self._handle.truncate(size)
        return size

    def sync(self, data_only: bool = False) -> None:
        """Makes the file durable: its content, its attributes, and for a new file also its names."""
        self._check()
        self._handle.sync(data_only)

    def stat(self) -> _ubtrfs.Stat:
        """The attributes of the file."""
        self._check()
        return self._handle.stat()

    def clone_range(
        self, source: IO[Any] | RawFile, length: int | None = None, *, source_offset: int = 0, offset: int = 0
    ) -> None:
        """Makes a range of this file share the data of a range of another file, instead of copying it.

        Offsets are multiples of the sector size, which is 4096 by default. `length` is such a multiple too, or ends at the
        end of `source`, which is the default.

        >>> import ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs:
        ...     fs.write_bytes("/a", b"one" + bytes(4093) + b"two" + bytes(4093))
        ...     with fs.open("/a", "rb") as a, fs.open("/b", "w+b", buffering=0) as b:
        ...         b.clone_range(a, source_offset=4096)
        ...         b.read(3)
        b'two'
        """
        self._check(self._writes, "writing")
        raw = _raw(source)
        if length != 0:
            self._handle.clone_range(offset, raw._handle, source_offset, length or 0)

    def dedupe_range(
        self,
        source: IO[Any] | RawFile,
        length: int | None = None,
        *,
        source_offset: int = 0,
        offset: int = 0,
        progress: Progress = None,
        job: _ubtrfs.Job | None = None,
    ) -> bool:
        """Compares two ranges, and makes them share their data if they are equal. Returns whether they are.

        Ranges are as in `clone_range`; `progress` and `job` as in `Manage`.
        """
        self._check(self._writes, "writing")
        raw = _raw(source)
        if length == 0:
            return True
        return self._handle.dedupe_range(offset, raw._handle, source_offset, length or 0, (progress, job))

    def close(self) -> None:
        """Closes the file. The content is durable only after `sync`, or `Filesystem.sync` or `close`."""
        if not self.closed:
            try:
                super().close()
            finally:
                self._handle.close()


def _raw(file: Any) -> RawFile:
    """The file without its buffers, which are written."""
    if not isinstance(file, RawFile) and getattr(file, "writable", bool)():
        file.flush()
    while not isinstance(file, RawFile):
        inner = getattr(file, "raw", None) or getattr(file, "buffer", None)
        if inner is None:
            raise TypeError(f"expected a file of a ubtrfs filesystem, not {type(file).__name__}")
        file = inner
    return file


def wrap(raw: RawFile, text: bool, buffering: int, encoding: str | None, errors: str | None, newline: str | None) -> IO[Any]:
    """Adds the layers that the built-in `open` adds."""
    try:
        if not text and (encoding is not None or errors is not None or newline is not None):
            raise ValueError("binary mode doesn't take an encoding, errors or newline argument")
        if buffering == 0:
            if text:
                raise ValueError("can't have unbuffered text I/O")
            return raw  # type: ignore[return-value]
        size = BUFFER_SIZE if buffering in (-1, 1) else buffering
        if size < 0:
            raise ValueError("invalid buffering size")
        buffered: Any
        if raw.readable() and raw.writable():
            buffered = io.BufferedRandom(raw, size)
        elif raw.writable():
            buffered = io.BufferedWriter(raw, size)
        else:
            buffered = io.BufferedReader(raw, size)
        if not text:
            return buffered  # type: ignore[no-any-return]
        wrapped = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        wrapped.mode = raw.mode  # type: ignore[misc]
        return wrapped
    except BaseException:
        raw.close()
        raise


def open_file(
    fs: _ubtrfs.Filesystem,
    path: bytes,
    shown: str | bytes,
    mode: str,
    permissions: int | None,
) -> tuple[RawFile, bool]:
    """Opens a file without a buffer. Also returns whether the mode is a text mode."""
    kind, updates, text = parse_mode(mode)
    handle = fs.open_file(
        path,
        read=kind == "r" or updates,
        write=kind in "wx" or updates,
        append=kind == "a",
        truncate=kind == "w",
        create=kind in "wa",
        exclusive=kind == "x",
        mode=permissions,
    )
    return RawFile(handle, shown, mode, kind, updates), text
