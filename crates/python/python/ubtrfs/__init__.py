"""Read and write btrfs filesystems in your own process: images, block devices, or objects of Python.

No root, no mount and no btrfs in the kernel is needed. Linux mounts what this package makes, and this package opens what
Linux makes.

>>> import ubtrfs
>>> with ubtrfs.make_in_memory(256 << 20) as fs:
...     fs.create_subvolume("/home")
...     with fs.open("/home/hello.txt", "w") as file:
...         _ = file.write("hello from btrfs\\n")
...     fs.snapshot("/home", "/monday", read_only=True)
...     fs.remove("/home/hello.txt")
...     (fs.path("/monday") / "hello.txt").read_text()
'hello from btrfs\\n'

Names in a filesystem are bytes. A path may be `str`, `bytes` or `os.PathLike`; a `str` has bytes that are not UTF-8 as
surrogates, as in Python's own `os`. A path starts at the opened subvolume, with or without a leading `/`.

Errors are `OSError` with an errno. `CorruptionError` is raised for damage, and names the place.
"""

from __future__ import annotations

from ._devices import Device, FileObjectDevice
from ._entries import DirEntry
from ._errors import CorruptionError
from ._files import RawFile
from ._filesystem import Filesystem
from ._manage import (
    BalanceCounts,
    BalanceFailure,
    BalanceFilter,
    BalanceReport,
    BalanceStatus,
    DamagedFile,
    DeviceShare,
    DeviceUsage,
    FileOfExtent,
    GroupUsage,
    Manage,
    Qgroup,
    QuotaStatus,
    ReplaceReport,
    ScrubbedDevice,
    ScrubCounts,
    ScrubReport,
    SpaceUsage,
)
from ._mount import Mount, mount
from ._opening import check, make, make_in_memory, open
from ._path import Path
from ._reports import CheckReport, CopyReport, Problem, Subvolume, Usage
from ._streams import ReceivedSubvolume, ReceiveReport, ReceiveStream, SendStream
from ._ubtrfs import Job, Stat, __version__

__all__ = [
    "BalanceCounts",
    "BalanceFailure",
    "BalanceFilter",
    "BalanceReport",
    "BalanceStatus",
    "CheckReport",
    "CopyReport",
    "CorruptionError",
    "DamagedFile",
    "Device",
    "DeviceShare",
    "DeviceUsage",
    "DirEntry",
    "FileObjectDevice",
    "FileOfExtent",
    "Filesystem",
    "GroupUsage",
    "Job",
    "Manage",
    "Mount",
    "Path",
    "Problem",
    "Qgroup",
    "QuotaStatus",
    "RawFile",
    "ReceiveReport",
    "ReceiveStream",
    "ReceivedSubvolume",
    "ReplaceReport",
    "ScrubCounts",
    "ScrubReport",
    "ScrubbedDevice",
    "SendStream",
    "SpaceUsage",
    "Stat",
    "Subvolume",
    "Usage",
    "__version__",
    "check",
    "make",
    "make_in_memory",
    "mount",
    "open",
]
