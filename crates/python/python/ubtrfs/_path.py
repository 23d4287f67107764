"""Paths inside of a filesystem, with the interface of `pathlib`."""

from __future__ import annotations

import os
import posixpath
import re
import stat as stat_module
from collections.abc import Iterator
from fnmatch import translate
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from ._filesystem import Filesystem
    from ._ubtrfs import Stat

__all__ = ["Path"]


class Path:
    """A path in an open filesystem. It works as `pathlib.Path` does, and has no working directory.

    >>> import ubtrfs
    >>> fs = ubtrfs.make_in_memory(256 << 20)
    >>> etc = fs.path("/etc")
    >>> (etc / "app").mkdir(parents=True)
    >>> _ = (etc / "app" / "config.toml").write_text("color = 'blue'")
    >>> [str(path) for path in etc.rglob("*.toml")]
    ['/etc/app/config.toml']
    >>> (etc / "app/config.toml").with_suffix(".bak").exists()
    False
    >>> fs.close()
    """

    __slots__ = ("_fs", "_pure")

    def __init__(self, fs: Filesystem, path: str | bytes | os.PathLike[str] | os.PathLike[bytes] | Path = "/") -> None:
        """A path in `fs`. Names that are not UTF-8 have surrogates, as in `os.fsdecode`."""
        text = str(path) if isinstance(path, Path) else os.fsdecode(path)
        self._fs = fs
        self._pure = PurePosixPath(posixpath.join("/", text.lstrip("/")))

    @property
    def filesystem(self) -> Filesystem:
        """The filesystem that the path is in."""
        return self._fs

    def _of(self, pure: PurePosixPath) -> Path:
        return Path(self._fs, str(pure))

    def __str__(self) -> str:
        return str(self._pure)

    def __bytes__(self) -> bytes:
        return os.fsencode(str(self._pure))

    def __repr__(self) -> str:
        return f"ubtrfs.Path({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Path):
            return NotImplemented
        return self._fs is other._fs and self._pure == other._pure

    def __hash__(self) -> int:
        return hash((id(self._fs), self._pure))

    def __lt__(self, other: Path) -> bool:
        return self._pure < other._pure

    def __truediv__(self, other: str | os.PathLike[str] | Path) -> Path:
        return self.joinpath(other)

    def joinpath(self, *others: str | os.PathLike[str] | Path) -> Path:
        """This path with more components."""
        return self._of(self._pure.joinpath(*(str(other) if isinstance(other, Path) else other for other in others)))

    def as_posix(self) -> str:
        """The path as `str`."""
        return str(self)

    @property
    def name(self) -> str:
        """The last component."""
        return self._pure.name

    @property
    def stem(self) -> str:
        """The last component without its suffix."""
        return self._pure.stem

    @property
    def suffix(self) -> str:
        """The suffix of the last component, with its dot."""
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the last component."""
        return self._pure.suffixes

    @property
    def parts(self) -> tuple[str, ...]:
        """The components, of which the first is `/`."""
        return self._pure.parts

    @property
    def parent(self) -> Path:
        """The directory of the path."""
        return self._of(self._pure.parent)

    @property
    def parents(self) -> list[Path]:
        """The directories above the path, the nearest first."""
        return [self._of(pure) for pure in self._pure.parents]

    def with_name(self, name: str) -> Path:
        """The path with another last component."""
        return self._of(self._pure.with_name(name))

    def with_stem(self, stem: str) -> Path:
        """The path with another last component, and the same suffix."""
        return self._of(self._pure.with_stem(stem))

    def with_suffix(self, suffix: str) -> Path:
        """The path with another suffix."""
        return self._of(self._pure.with_suffix(suffix))

    def relative_to(self, other: str | Path) -> PurePosixPath:
        """The path from `other` to this path."""
        return self._pure.relative_to(str(other))

    def is_relative_to(self, other: str | Path) -> bool:
        """Whether `other` is this path, or a directory above it."""
        return self._pure.is_relative_to(str(other))

    def match(self, pattern: str) -> bool:
        """Whether the path matches a pattern, from its end."""
        return self._pure.match(pattern)

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        """The attributes."""
        return self._fs.stat(self, follow_symlinks=follow_symlinks)

    def lstat(self) -> Stat:
        """The attributes of a link itself."""
        return self._fs.lstat(self)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the path exists."""
        return self._fs.exists(self) if follow_symlinks else self._fs.lexists(self)

    def is_dir(self) -> bool:
        """Whether the path leads to a directory."""
        return self._fs.isdir(self)

    def is_file(self) -> bool:
        """Whether the path leads to a regular file."""
        return self._fs.isfile(self)

    def is_symlink(self) -> bool:
        """Whether the path is a symbolic link."""
        return self._fs.islink(self)

    def is_subvolume(self) -> bool:
        """Whether the path is the root of a subvolume."""
        return self._fs.is_subvolume(self)

    def samefile(self, other: Path) -> bool:
        """Whether both paths lead to one file."""
        mine, others = self.stat(), other.stat()
        return self._fs is other._fs and (mine.st_dev, mine.st_ino) == (others.st_dev, others.st_ino)

    def iterdir(self) -> Iterator[Path]:
        """The entries of the directory."""
        for name in self._fs.listdir(str(self)):
            yield self.joinpath(name)

    def walk(self, top_down: bool = True, follow_symlinks: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Walks the directory, as `Filesystem.walk` does."""
        for top, dirs, files in self._fs.walk(str(self), top_down, followlinks=follow_symlinks):
            yield self._of(PurePosixPath(top)), dirs, files

    def glob(self, pattern: str) -> Iterator[Path]:
        """The paths below this one that match a pattern. `**` stands for any number of directories."""
        parts = PurePosixPath(pattern).parts
        if not parts:
            raise ValueError(f"unacceptable pattern: {pattern!r}")
        if parts[0] == "/":
            raise NotImplementedError("a pattern that begins with '/' is not supported")
        return self._glob(parts, set())

    def rglob(self, pattern: str) -> Iterator[Path]:
        """The paths at any depth that match a pattern."""
        return self.glob(f"**/{pattern}")

    def _glob(self, parts: tuple[str, ...], seen: set[Path]) -> Iterator[Path]:
        if not parts:
            if self not in seen:
                seen.add(self)
                yield self
            return
        first, rest = parts[0], parts[1:]
        if first == "**":
            yield from self._glob(rest, seen) if rest else self._glob((), seen)
            for entry in self._entries():
                if stat_module.S_ISDIR(entry[1]):
                    yield from self.joinpath(entry[0])._glob(parts, seen)
        elif re.search(r"[*?\[]", first) is None:
            path = self.joinpath(first)
            if path.exists(follow_symlinks=False):
                yield from path._glob(rest, seen)
        else:
            matches = re.compile(translate(first)).match
            for name, bits in self._entries():
                if matches(name) and (not rest or stat_module.S_ISDIR(bits) or stat_module.S_ISLNK(bits)):
                    yield from self.joinpath(name)._glob(rest, seen)

    def _entries(self) -> list[tuple[str, int]]:
        try:
            return [(entry.name, entry.type_bits) for entry in self._fs.scandir(str(self))]
        except (NotADirectoryError, FileNotFoundError):
            return []

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Opens the file, as `Filesystem.open` does."""
        return self._fs.open(self, mode, buffering, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        """The whole content."""
        return self._fs.read_bytes(self)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The whole content as text."""
        with self.open("r", encoding=encoding, errors=errors) as file:
            text: str = file.read()
            return text

    def write_bytes(self, data: Union[bytes, bytearray, memoryview]) -> int:
        """Replaces the content, and returns its length."""
        content = data if isinstance(data, bytes) else memoryview(data).tobytes()
        self._fs.write_bytes(self, content)
        return len(content)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        """Replaces the content by text."""
        with self.open("w", encoding=encoding, errors=errors, newline=newline) as file:
            return file.write(data)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Makes an empty file, or sets the times of an existing one to now."""
        if exist_ok and self.exists():
            self._fs.utime(self)
        else:
            self._fs.open(self, "ab" if exist_ok else "xb", permissions=None if mode == 0o666 else mode).close()

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes a directory."""
        if parents:
            self._fs.makedirs(self.parent, exist_ok=True)
        try:
            self._fs.mkdir(self, mode)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def rmdir(self) -> None:
        """Removes an empty directory."""
        self._fs.rmdir(self)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file or a link."""
        try:
            self._fs.remove(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: str | Path) -> Path:
        """Renames the path, replaces an existing file, and returns the new path."""
        new = target if isinstance(target, Path) else Path(self._fs, target)
        self._fs.rename(self, new)
        return new

    def replace(self, target: str | Path) -> Path:
        """Works as `rename`."""
        return self.rename(target)

    def symlink_to(self, target: str | Path) -> None:
        """Makes this path a symbolic link to `target`."""
        self._fs.symlink(str(target), self)

    def hardlink_to(self, target: str | Path) -> None:
        """Makes this path another name of the file `target`."""
        self._fs.link(target, self)

    def readlink(self) -> PurePosixPath:
        """The target of a symbolic link."""
        return PurePosixPath(self._fs.readlink(str(self)))

    def chmod(self, mode: int) -> None:
        """Sets the permissions."""
        self._fs.chmod(self, mode)
