"""Work on a whole filesystem: balance, scrub, devices, quotas, space."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional, Union
from uuid import UUID

from . import _ubtrfs
from ._devices import host_devices, host_paths
from ._names import AnyPath, encode
from ._streams import Progress
from ._ubtrfs import Job

__all__ = [
    "BalanceCounts",
    "BalanceFailure",
    "BalanceFilter",
    "BalanceReport",
    "BalanceStatus",
    "DamagedFile",
    "DeviceShare",
    "DeviceUsage",
    "FileOfExtent",
    "GroupUsage",
    "Manage",
    "Qgroup",
    "QuotaStatus",
    "ReplaceReport",
    "ScrubCounts",
    "ScrubReport",
    "ScrubbedDevice",
    "SpaceUsage",
]

#: A quota group as LEVEL/NUMBER, such as `1/100`, or the id of a subvolume, whose group it is then.
QgroupName = Union[str, int]


@dataclass(frozen=True)
class BalanceFilter:
    """Chooses block groups of one type. A block group must match everything that is set."""

    #: Profiles, of which the block group has one: single, dup, raid0, raid1, raid1c3, raid1c4 or raid10.
    profiles: Sequence[str] = ()
    #: The used part of the block group in percent: from the first number up to below the second.
    usage: Optional[tuple[int, int]] = None
    #: A device on which the block group has a part.
    device: Optional[int] = None
    #: Logical addresses, of which the block group has some: from the first up to below the second.
    range: Optional[tuple[int, int]] = None
    #: The most block groups to move.
    limit: Optional[int] = None
    #: The profile that the block groups get.
    convert: Optional[str] = None
    #: Leave out block groups that have the profile `convert` already.
    soft: bool = False


@dataclass(frozen=True)
class BalanceCounts:
    """Numbers of block groups."""

    #: Those that the filters choose.
    expected: int
    #: Those that were looked at.
    considered: int
    #: Those that were moved.
    completed: int
    #: Those that stayed, because an extent could not be moved, or because there was no space.
    failed: int
    #: Those among `failed` for which there was no space.
    without_space: int


@dataclass(frozen=True)
class FileOfExtent:
    """A file that uses an extent."""

    subvolume_id: int
    inode: int
    #: From the top level, if the file has a path.
    path: Optional[str]


@dataclass(frozen=True)
class BalanceFailure:
    """An extent that could not be moved."""

    address: int
    reason: str
    files: list[FileOfExtent]


@dataclass(frozen=True)
class BalanceReport:
    """The result of a balance."""

    counts: BalanceCounts
    failures: list[BalanceFailure]

    @classmethod
    def _of(cls, words: _ubtrfs._Balance) -> BalanceReport:
        counts, failures = words
        return cls(
            BalanceCounts(**counts),
            [
                BalanceFailure(address, reason, [FileOfExtent(root, ino, _decode(path)) for root, ino, path in files])
                for address, reason, files in failures
            ],
        )


@dataclass(frozen=True)
class BalanceStatus:
    """A balance that runs or is paused."""

    #: running, pausing, cancelling or paused.
    state: str
    counts: BalanceCounts


@dataclass(frozen=True)
class ScrubCounts:
    """What was read, and the errors."""

    data_bytes: int
    tree_bytes: int
    #: Sectors that could not be read.
    read_errors: int
    #: Sectors of data that contradict their checksums.
    csum_errors: int
    #: Sectors of tree blocks with a wrong checksum, address or generation.
    verify_errors: int
    #: Superblocks that are bad or old.
    super_errors: int
    #: Sectors without checksums.
    no_csum: int
    #: Errors with a good copy elsewhere, from which they were repaired if that was allowed.
    corrected_errors: int
    #: Errors without a good copy.
    uncorrectable_errors: int


@dataclass(frozen=True)
class DamagedFile:
    """A file with bad data."""

    subvolume_id: int
    inode: int
    #: From the top level, if the file has a path.
    path: Optional[str]
    #: Bytes that have a good copy, from which they were repaired if that was allowed.
    repaired_bytes: int
    #: Bytes without a good copy.
    lost_bytes: int

    @classmethod
    def _all_of(cls, files: list[_ubtrfs._Damage]) -> list[DamagedFile]:
        return [cls(root, ino, _decode(path), repaired, lost) for (root, ino, path), repaired, lost in files]


@dataclass(frozen=True)
class ScrubbedDevice:
    """The scrub of a device."""

    id: int
    counts: ScrubCounts
    #: Why the scrub of the device ended early, for example because it was cancelled; `None` if everything was read.
    error: Optional[str]


@dataclass(frozen=True)
class ScrubReport:
    """The result of a scrub."""

    devices: list[ScrubbedDevice]
    files: list[DamagedFile]
    #: Bytes of bad tree blocks that have a good copy.
    repaired_block_bytes: int
    #: Bytes of bad tree blocks without a good copy.
    lost_block_bytes: int

    @property
    def is_clean(self) -> bool:
        """Whether everything was read, and nothing was bad."""
        return all(
            device.error is None and not (device.counts.corrected_errors or device.counts.uncorrectable_errors)
            for device in self.devices
        )


@dataclass(frozen=True)
class ReplaceReport:
    """The result of a replacement."""

    counts: ScrubCounts
    #: Files with data that has no good copy.
    files: list[DamagedFile]
    #: Bytes of tree blocks without a good copy.
    lost_block_bytes: int


@dataclass(frozen=True)
class QuotaStatus:
    """The state of quotas."""

    #: full or simple.
    kind: str
    #: Whether the numbers are right.
    is_consistent: bool
    #: Whether all extents are being counted.
    is_counting: bool


@dataclass(frozen=True)
class Qgroup:
    """A quota group."""

    #: LEVEL/NUMBER. The number of a group of level 0 is the id of its subvolume.
    id: str
    #: Bytes of all extents that the group refers to.
    referenced: int
    #: Bytes of the extents that only this group refers to.
    exclusive: int
    max_referenced: Optional[int]
    max_exclusive: Optional[int]
    #: Groups that this group belongs to.
    parents: list[str]
    #: Groups that belong to this group.
    members: list[str]


@dataclass(frozen=True)
class GroupUsage:
    """All block groups of one type and profile."""

    #: data, metadata, system or data+metadata.
    type: str
    profile: str
    #: Bytes of the block groups, counted once for all copies.
    total: int
    #: Bytes of their extents.
    used: int


@dataclass(frozen=True)
class DeviceShare:
    """What block groups of one type and profile have on a device."""

    type: str
    profile: str
    bytes: int


@dataclass(frozen=True)
class DeviceUsage:
    """A device of a filesystem."""

    id: int
    uuid: UUID
    #: `None` if the device is missing.
    path: Optional[str]
    #: in sync, being updated, missed changes, missing or failed.
    state: str
    is_seed: bool
    #: Bytes that the filesystem uses, allocated or not.
    total: int
    #: Bytes of the device past `total`.
    slack: int
    #: Bytes in block groups.
    allocated: int
    groups: list[DeviceShare]


@dataclass(frozen=True)
class SpaceUsage:
    """The space by type of block groups, and by device."""

    groups: list[GroupUsage]
    #: The size of the global reserve.
    global_reserve: int
    global_reserve_used: int
    devices: list[DeviceUsage]


def _decode(path: bytes | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def _words(chosen: BalanceFilter | None) -> dict[str, Any] | None:
    return None if chosen is None else asdict(chosen)


def _new_device(target: Any, size: int | None) -> tuple[Any, int | None]:
    """The bytes of a path and the size of a new file, or a device."""
    paths = host_paths(target)
    devices: Sequence[Any] = paths if paths is not None else host_devices(target, size)
    if len(devices) != 1:
        raise ValueError("give one device")
    return devices[0], size if paths is not None else None


class Manage:
    """Work on a whole filesystem; the attribute `manage` of a `Filesystem`.

    Other threads run meanwhile. Long work calls `progress` with the number of bytes that are done, at most 20 times in a
    second, and for the last time at its end. An exception of `progress`, and Ctrl-C, cancel the work and are passed on. With
    a `Job`, other threads see how far the work is, and cancel it; `OSError` with ECANCELED is raised then.

    >>> import ubtrfs
    >>> with ubtrfs.make_in_memory(1 << 30) as fs:
    ...     fs.write_bytes("/f", bytes(1 << 20))
    ...     report = fs.manage.balance(data=ubtrfs.BalanceFilter(convert="dup"))
    ...     data = [group for group in fs.manage.space_usage().groups if group.type == "data"]
    ...     fs.manage.scrub().is_clean, [group.profile for group in data]
    (True, ['dup'])
    """

    __slots__ = ("_manage",)

    def __init__(self, fs: _ubtrfs.Filesystem) -> None:
        """Made by `Filesystem.manage`."""
        self._manage = _ubtrfs.Manage(fs)

    # Balance

    def balance(
        self,
        data: BalanceFilter | None = None,
        metadata: BalanceFilter | None = None,
        system: BalanceFilter | None = None,
        *,
        force: bool = False,
        progress: Progress = None,
        job: Job | None = None,
    ) -> BalanceReport:
        """Moves the block groups that the filters choose. Their content takes less space afterwards, or has another profile.

        A type without a filter stays; without any filter, all block groups move. `force` allows a conversion that reduces
        the number of copies of metadata. After a pause, this raises `OSError` with ECANCELED, too.
        """
        if data is None and metadata is None and system is None:
            data = metadata = system = BalanceFilter()
        watch = (progress, job)
        return BalanceReport._of(
            self._manage.balance(_words(data), _words(metadata), _words(system), force=force, watch=watch)
        )

    def resume_balance(self, *, progress: Progress = None, job: Job | None = None) -> BalanceReport:
        """Goes on with a balance that was paused, also by the end of an earlier session."""
        return BalanceReport._of(self._manage.resume_balance((progress, job)))

    def pause_balance(self) -> None:
        """Pauses the balance of another thread, and waits until it has stopped."""
        self._manage.pause_balance()

    def cancel_balance(self) -> None:
        """Ends a running or paused balance. What was moved stays in its new place."""
        self._manage.cancel_balance()

    def balance_status(self) -> BalanceStatus | None:
        """The balance that runs or is paused; `None` if there is none."""
        words = self._manage.balance_status()
        return None if words is None else BalanceStatus(words[0], BalanceCounts(**words[1]))

    # Scrub

    def scrub(
        self,
        devices: Iterable[int] = (),
        *,
        repair: bool = True,
        bytes_per_second: int = 0,
        progress: Progress = None,
        job: Job | None = None,
    ) -> ScrubReport:
        """Reads everything, compares it with its checksums, and repairs what has a good copy.

        `devices` are ids, by default all devices. `bytes_per_second` is the limit for each of them; 0 means none. A scrub
        that is cancelled has a report: the devices have the error then.
        """
        scrubbed, files, (repaired, lost) = self._manage.scrub(
            list(devices), repair=repair, bytes_per_second=bytes_per_second, watch=(progress, job)
        )
        return ScrubReport(
            [ScrubbedDevice(number, ScrubCounts(**counts), error) for number, counts, error in scrubbed],
            DamagedFile._all_of(files),
            repaired,
            lost,
        )

    def cancel_scrub(self) -> None:
        """Ends the scrub of another thread, and waits until it has ended."""
        self._manage.cancel_scrub()

    # Devices

    def add_device(
        self, device: Any, *, size: int | None = None, progress: Progress = None, job: Job | None = None
    ) -> int:
        """Adds a device, and returns its id. Everything on the device is lost.

        The device is a path, a seekable file object or a `Device`. With `size`, a path names a new, sparse image file.

        >>> import io, ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs:
        ...     device = fs.manage.add_device(io.BytesIO(), size=256 << 20)
        ...     fs.manage.remove_devices([1])
        ...     device, [one.id for one in fs.manage.space_usage().devices]
        (2, [2])
        """
        new, size = _new_device(device, size)
        return self._manage.add_device(new, size=size, watch=(progress, job))

    def remove_devices(
        self, devices: Iterable[int], *, progress: Progress = None, job: Job | None = None
    ) -> None:
        """Moves everything on the devices with these ids to the others, and removes them."""
        self._manage.remove_devices(list(devices), (progress, job))

    def replace_device(
        self,
        device: int,
        new: Any,
        *,
        size: int | None = None,
        progress: Progress = None,
        job: Job | None = None,
    ) -> ReplaceReport:
        """Copies the device with this id to a new one, which takes its place. `new` and `size` are as for `add_device`."""
        target, size = _new_device(new, size)
        counts, files, lost = self._manage.replace_device(device, target, size=size, watch=(progress, job))
        return ReplaceReport(ScrubCounts(**counts), DamagedFile._all_of(files), lost)

    def resize_device(self, device: int, size: int, *, progress: Progress = None, job: Job | None = None) -> None:
        """Sets the bytes of a device that the filesystem uses. What lies behind them moves first."""
        self._manage.resize_device(device, size, (progress, job))

    def min_device_size(self, device: int) -> int:
        """The smallest size to which `resize_device` surely shrinks a device."""
        return self._manage.min_device_size(device)

    # Quotas

    def enable_quotas(self, kind: str = "full") -> None:
        """Switches quotas on: full or simple ones. Full quotas count all extents; `wait_for_quotas` waits for that.

        >>> import ubtrfs
        >>> with ubtrfs.make_in_memory(256 << 20) as fs:
        ...     fs.create_subvolume("/home")
        ...     fs.manage.enable_quotas()
        ...     fs.manage.wait_for_quotas()
        ...     fs.manage.limit_qgroup(fs.subvolume("/home").id, max_referenced=1 << 20)
        ...     fs.write_bytes("/home/f", bytes(4 << 20))
        Traceback (most recent call last):
            ...
        OSError: [Errno 122] ...
        """
        self._manage.enable_quotas(kind)

    def disable_quotas(self) -> None:
        """Switches quotas off. All groups and limits are lost."""
        self._manage.disable_quotas()

    def quota_status(self) -> QuotaStatus | None:
        """The state of quotas; `None` if they are off."""
        words = self._manage.quota_status()
        return None if words is None else QuotaStatus(*words)

    def wait_for_quotas(self, *, progress: Progress = None, job: Job | None = None) -> None:
        """Waits until all extents are counted. Cancelling ends the wait only."""
        self._manage.wait_for_quotas((progress, job))

    def qgroups(self) -> list[Qgroup]:
        """All quota groups by id, with the numbers of the last commit."""
        return [Qgroup(**words) for words in self._manage.qgroups()]

    def create_qgroup(self, group: QgroupName) -> None:
        """Makes a quota group of level 1 or higher. Groups of level 0 are made with their subvolumes."""
        self._manage.create_qgroup(str(group))

    def destroy_qgroup(self, group: QgroupName) -> None:
        """Removes a quota group without members."""
        self._manage.destroy_qgroup(str(group))

    def assign_qgroup(self, member: QgroupName, parent: QgroupName) -> bool:
        """Makes a group a member of one of a higher level. Returns whether all extents must be counted again."""
        return self._manage.assign_qgroup(str(member), str(parent))

    def remove_qgroup(self, member: QgroupName, parent: QgroupName) -> bool:
        """Takes a member out of a group. Returns whether all extents must be counted again."""
        return self._manage.remove_qgroup(str(member), str(parent))

    def limit_qgroup(
        self, group: QgroupName, *, max_referenced: int | None = None, max_exclusive: int | None = None
    ) -> None:
        """Sets both limits of a group in bytes; `None` means no limit. A write beyond a limit fails with EDQUOT."""
        self._manage.limit_qgroup(str(group), max_referenced, max_exclusive)

    # Files and space

    def defragment(
        self,
        path: AnyPath,
        *,
        start: int = 0,
        end: int | None = None,
        small: int = 32 << 20,
        compress: str | None = None,
        unshare: bool = False,
        progress: Progress = None,
        job: Job | None = None,
    ) -> int:
        """Joins the small extents of a file, and returns the bytes that were rewritten.

        Extents of at least `small` bytes stay, unless they are to be compressed. `compress` is a method, as in `zstd:3`.
        `unshare` also rewrites extents that snapshots or other files share, which takes more space then.
        """
        watch = (progress, job)
        return self._manage.defragment(
            encode(path), start=start, end=end, small=small, compress=compress, unshare=unshare, watch=watch
        )

    def space_usage(self) -> SpaceUsage:
        """The space by type of block groups, and by device."""
        groups, (reserve, reserve_used), devices = self._manage.space_usage()
        shown = []
        for device in devices:
            shares = [DeviceShare(*share) for share in device["groups"]]
            shown.append(DeviceUsage(**{**device, "uuid": UUID(device["uuid"]), "groups": shares}))
        return SpaceUsage([GroupUsage(*group) for group in groups], reserve, reserve_used, shown)

    def trim(self, min_bytes: int = 0, *, progress: Progress = None, job: Job | None = None) -> int:
        """Tells the devices which space is free, and returns its bytes. Shorter ranges than `min_bytes` are left out."""
        return self._manage.trim(min_bytes, (progress, job))
