"""A program that mypy checks: what the package's functions return has a type."""

from __future__ import annotations

import io
from collections.abc import Iterator

import ubtrfs


def names(fs: ubtrfs.Filesystem) -> list[str]:
    return fs.listdir("/") + [entry.name for entry in fs.scandir("/")]


def raw_names(fs: ubtrfs.Filesystem) -> list[bytes]:
    return fs.listdir(b"/") + [entry.name for entry in fs.scandir(b"/")]


def walked(fs: ubtrfs.Filesystem) -> Iterator[str]:
    for top, _, files in fs.walk("/"):
        yield from (f"{top}/{name}" for name in files)


def sizes(fs: ubtrfs.Filesystem) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in fs.path("/").rglob("*")}


def kept(fs: ubtrfs.Filesystem) -> list[tuple[int, str]]:
    return [(subvolume.id, str(subvolume.uuid)) for subvolume in fs.subvolumes() if subvolume.read_only]


class Storage:
    size = 256 << 20

    def read_at(self, offset: int, length: int) -> bytes:
        return bytes(length)

    def write_at(self, offset: int, data: bytes) -> None:
        del offset, data

    def flush(self) -> None:
        return


DEVICE: ubtrfs.Device = Storage()


def copied(fs: ubtrfs.Filesystem) -> int:
    stream: io.RawIOBase = fs.send("/snapshot")
    report: ubtrfs.ReceiveReport = fs.receive(stream, "/to")
    return report.nr_bytes


def balanced(fs: ubtrfs.Filesystem, job: ubtrfs.Job) -> list[str]:
    report: ubtrfs.BalanceReport = fs.manage.balance(data=ubtrfs.BalanceFilter(usage=(0, 50)), job=job)
    return [f"{failure.address}: {failure.reason}" for failure in report.failures]


def spaces(fs: ubtrfs.Filesystem) -> dict[str, int]:
    return {f"{group.type} {group.profile}": group.used for group in fs.manage.space_usage().groups}


def mounted(image: str) -> str:
    with ubtrfs.mount(image, "/mnt") as path:
        text: str = path
    return text
