"""Devices that are objects of Python."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol, Union, runtime_checkable

__all__ = ["Device", "FileObjectDevice"]


@runtime_checkable
class Device(Protocol):
    """What a device must offer. Threads call the methods, also several at once.

    A device may also have `discard(offset, length)`, which frees a range whose content is not needed any more, and the
    attributes `name` for messages and `read_only`.
    """

    @property
    def size(self) -> int:
        """The size in bytes, which never changes."""

    def read_at(self, offset: int, length: int) -> Union[bytes, bytearray, memoryview]:
        """Returns exactly `length` bytes."""

    def write_at(self, offset: int, data: bytes) -> Any:
        """Writes all of `data`. A later read returns it, also before a flush."""

    def flush(self) -> Any:
        """Makes all writes durable. Otherwise a power cut may lose changes that were reported as durable."""


class FileObjectDevice:
    """A device whose bytes are those of a seekable binary file object.

    >>> import io, ubtrfs
    >>> storage = io.BytesIO()
    >>> with ubtrfs.make(storage, size=256 << 20) as fs:
    ...     fs.write_bytes("/f", b"text")
    >>> with ubtrfs.open(storage, read_only=True) as fs:
    ...     fs.read_bytes("/f")
    b'text'
    """

    def __init__(self, file: Any, size: int | None = None) -> None:
        """Wraps `file`. With `size`, a writable file that is shorter is extended."""
        self._file = file
        # A file object has one position.
        self._lock = threading.Lock()
        writable = getattr(file, "writable", None)
        self.read_only = not (writable() if callable(writable) else hasattr(file, "write"))
        self.name = str(getattr(file, "name", None) or f"a file object, {type(file).__name__}")
        end = self._end()
        if size is not None and end < size and not self.read_only:
            file.seek(size - 1)
            file.write(b"\0")
            end = size
        self.size = end if size is None else min(size, end)

    def _end(self) -> int:
        with self._lock:
            return int(self._file.seek(0, io.SEEK_END))

    def read_at(self, offset: int, length: int) -> bytes:
        """Reads exactly `length` bytes."""
        with self._lock:
            self._file.seek(offset)
            data: bytes = self._file.read(length)
            if len(data) == length:
                return data
            parts = [data]
            missing = length - len(data)
            # A raw file may return less than was asked for.
            while missing and parts[-1]:
                parts.append(self._file.read(missing) or b"")
                missing -= len(parts[-1])
            return b"".join(parts)

    def write_at(self, offset: int, data: bytes) -> None:
        """Writes all of `data`."""
        with self._lock:
            self._file.seek(offset)
            rest = memoryview(data)
            while rest:
                written = self._file.write(rest)
                rest = rest[len(rest) if written is None else written :]

    def flush(self) -> None:
        """Flushes the file object, and the file of the host if there is one."""
        with self._lock:
            self._file.flush()
            try:
                descriptor = self._file.fileno()
            except (AttributeError, OSError):
                return
            os.fsync(descriptor)


def is_device(target: object) -> bool:
    """Whether an object has the methods of a device."""
    return all(callable(getattr(target, name, None)) for name in ("read_at", "write_at", "flush"))


def is_file_object(target: object) -> bool:
    """Whether an object is a seekable file object."""
    return callable(getattr(target, "read", None)) and callable(getattr(target, "seek", None))


def as_device(target: Any, size: int | None = None) -> Any:
    """The device for a device or a file object."""
    return target if is_device(target) else FileObjectDevice(target, size)


def host_paths(target: object) -> list[bytes] | None:
    """The paths that the argument of `open` or `make` names; `None` if it has objects."""
    if isinstance(target, (str, bytes, os.PathLike)):
        return [os.fsencode(target)]
    if isinstance(target, Sequence) and target and all(isinstance(one, (str, bytes, os.PathLike)) for one in target):
        return [os.fsencode(one) for one in target]
    return None


def host_devices(target: Any, size: int | None = None) -> list[Any]:
    """The devices for the argument of `open` or `make`: devices or file objects, one or several."""
    many = target if isinstance(target, (list, tuple)) else [target]
    for one in many:
        if not is_device(one) and not is_file_object(one):
            raise TypeError(f"expected a path, a seekable file object or a device, not {type(one).__name__}")
    return [as_device(one, size) for one in many]
