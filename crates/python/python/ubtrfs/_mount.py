"""Mounting an image, so that all programs can use its files.

The program `ubtrfs mount` serves the mount, in a process of its own. A thread of this process would not be sound:

- The library unmounts at SIGINT, SIGTERM and SIGHUP. Their handlers belong to Python.
- A thread of Python that touches a file of the mount may hold the interpreter's lock, for example at a page fault in a
  mapped file. The server must answer then, and so it must need nothing of the interpreter.
- When this process ends, also by a crash, a mount that it serves fails all requests, and what is not committed is lost.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, AnyStr, Generic, Union

from ._devices import host_paths

__all__ = ["Mount", "mount"]

#: Seconds until a mount that was detached has left its directory.
DETACH_SECONDS = 10.0


def _run(*words: str | bytes) -> tuple[int, str, BaseException | None]:
    """Runs a command to its end. Returns its status, what it said, and an interrupt that came meanwhile."""
    # A file, because a server that goes on keeps its standard error open. The session keeps Ctrl-C away from the command.
    with tempfile.TemporaryFile() as said:
        command = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        interrupt = None
        try:
            status = command.wait()
        except BaseException as exception:
            # The caller has to know whether the mount is there. A second interrupt ends the wait.
            interrupt = exception
            status = command.wait()
        said.seek(0)
        text = said.read().decode("utf-8", "replace").strip()
    return status, text.removeprefix("ubtrfs: ").removeprefix("error: "), interrupt


class Mount(Generic[AnyStr]):
    """A mounted filesystem, from `mount`. A `with` block has the path of its directory, and unmounts at its end."""

    def __init__(self, program: str, path: AnyStr) -> None:
        """Made by `mount`."""
        self._program = program
        #: The directory.
        self.path: AnyStr = path
        self.is_mounted = True

    def __enter__(self) -> AnyStr:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unmounts. After an exception in the block, a mount that is still in use is committed and detached."""
        try:
            self.unmount()
        except OSError:
            if kind is None:
                raise
            # Files that the block has opened may be in use until the exception is handled.
            self._detach()

    def __repr__(self) -> str:
        return f"<ubtrfs.Mount {self.path!r}{'' if self.is_mounted else ' unmounted'}>"

    def unmount(self) -> None:
        """Unmounts, and returns when the last commit is durable. Fails with EBUSY while a program uses the mount."""
        if not self.is_mounted:
            return
        status, text, interrupt = _run(self._program, "umount", "--", self.path)
        self.is_mounted = status != 0
        if interrupt is not None:
            raise interrupt
        if status != 0:
            is_busy = "busy" in text or "in use" in text
            raise OSError(errno.EBUSY if is_busy else errno.EIO, f"cannot unmount: {text}", os.fsdecode(self.path))

    def _detach(self) -> None:
        _run(self._program, "sync", "--", self.path)
        # The command ends when nothing uses the mount any more, which may be after the end of this process.
        detach = '"$0" umount --lazy -- "$1" > /dev/null 2>&1 &'
        _run("/bin/sh", "-c", detach, self._program, self.path)
        end = time.monotonic() + DETACH_SECONDS
        while os.path.ismount(self.path) and time.monotonic() < end:
            time.sleep(0.02)
        self.is_mounted = os.path.ismount(self.path)


def mount(
    target: Any,
    directory: Union[AnyStr, os.PathLike[AnyStr]],
    *,
    read_only: bool = False,
    subvol: str | None = None,
    options: str = "",
    devices: Sequence[Any] = (),
    memory: int | None = None,
) -> Mount[AnyStr]:
    """Mounts an image file or block device on an empty directory, by the program `ubtrfs`, which must be in PATH.

    It needs FUSE: `/dev/fuse`, and without root the program `fusermount3`. The keywords are those of `open`; `options` may
    also have those of mount points, such as `nosuid`. The `with` block ends by an unmount that waits for the last commit,
    also after an exception. Without a `with` block, the mount stays until `unmount`, also after the end of this process.

    ```
    with ubtrfs.mount("disk.img", "/mnt") as path:
        shutil.copytree("/etc", os.path.join(path, "etc"))
    ```
    """
    paths = host_paths(target)
    if paths is None:
        raise TypeError("only image files and block devices are mounted, not objects of Python; give a path")
    where = os.fspath(directory)
    program = shutil.which("ubtrfs")
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "mounting needs the program ubtrfs in PATH; install it", "ubtrfs")
    given = [options] if options else []
    if subvol is not None:
        if "," in subvol:
            raise ValueError("the path of a subvolume to mount cannot have a comma; set it as the default subvolume")
        given.append(f"subvol={subvol}")
    words: list[str | bytes] = [program, "mount"]
    for option in given:
        words.extend(["-o", option])
    if read_only:
        words.append("--read-only")
    if memory is not None:
        words.extend(["--memory", str(memory)])
    words.append("--")
    words.extend(paths)
    words.extend(os.fsencode(device) for device in devices)
    words.append(os.fsencode(where))
    status, text, interrupt = _run(*words)
    if status != 0 and interrupt is None:
        raise OSError(_errno_of(text), f"cannot mount: {text}", os.fsdecode(paths[0]))
    made = Mount(program, where)
    if interrupt is not None:
        if status == 0:
            made.unmount()
        raise interrupt
    return made


def _errno_of(text: str) -> int:
    """The errno that a message of the program means; EIO for any other."""
    for words, number in (
        ("No such file", errno.ENOENT),
        ("does not exist", errno.ENOENT),
        ("ermission", errno.EACCES),
        ("in use", errno.EBUSY),
        ("busy", errno.EBUSY),
    ):
        if words in text:
            return number
    return errno.EIO
