"""Copies between the host and a filesystem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ubtrfs


def about(path: Path) -> tuple[int, int, int, int]:
    status = path.lstat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns


def test_a_tree_goes_there_and_back(fs: ubtrfs.Filesystem, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "f").write_bytes(b"x" * 100_000)
    os.link(source / "f", source / "deep" / "same")
    (source / "link").symlink_to("f")
    odd = os.fsdecode(b"new\nline \xff")
    (source / odd).write_bytes(b"odd")
    os.chmod(source / "f", 0o640)
    os.utime(source / "f", ns=(5, 6))
    made = fs.copy_from_host(source, "/copy")
    assert (made.files, made.directories, made.symlinks, made.hard_links) == (2, 3, 1, 1)
    assert made.bytes == 100_003 and made.failures == []
    assert fs.copy_to_host("/copy", back) == made
    for path in [".", "f", "deep", "deep/er", "deep/same", "link", odd]:
        assert about(source / path) == about(back / path), path
    assert (back / "f").read_bytes() == b"x" * 100_000 and (back / "f").stat().st_nlink == 2
    # Other owners, and nothing kept.
    assert fs.copy_from_host(source, "/owned", owner=(7, 8)).failures == []
    assert (fs.stat("/owned/f").st_uid, fs.stat("/owned/f").st_gid) == (7, 8)
    fs.copy_from_host(source / "f", "/plain", keep=False)
    assert fs.stat("/plain").st_mtime_ns > 6


def test_errors_name_what_is_missing(fs: ubtrfs.Filesystem, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fs.copy_from_host(tmp_path / "missing", "/copy")
    with pytest.raises(FileNotFoundError):
        fs.copy_to_host("/missing", tmp_path / "copy")
