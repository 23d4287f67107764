"""Fixtures of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ubtrfs

MIB = 1 << 20


@pytest.fixture
def fs() -> Iterator[ubtrfs.Filesystem]:
    """A filesystem in memory."""
    with ubtrfs.make_in_memory(256 * MIB) as made:
        yield made


@pytest.fixture
def image(tmp_path: Path) -> str:
    """The path of an image that is not made yet."""
    return str(tmp_path / "disk.img")


def missing(what: str) -> None:
    """Skips the test; fails in CI, where nothing may be skipped."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs {what}")
    pytest.skip(f"SKIPPED: this test needs {what}")


def btrfs_check(path: str) -> None:
    """Has `btrfs check` judge an image."""
    if shutil.which("btrfs") is None:
        missing("the program btrfs")
    done = subprocess.run(["btrfs", "check", "--check-data-csum", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[object]:
    """Mounts an image with Linux's btrfs, read-only."""
    points: list[str] = []

    def mount(path: str, *options: str) -> str:
        if os.geteuid() != 0:
            missing("root, for mounts of Linux")
        point = str(tmp_path / f"mount-{len(points)}")
        os.mkdir(point)
        words = ",".join(["loop", "ro", *options])
        done = subprocess.run(["mount", "-t", "btrfs", "-o", words, path, point], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            missing(f"a mount of Linux's btrfs: {done.stderr}")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", point], check=True)
