"""The programs in `examples`, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ubtrfs
from conftest import MIB, btrfs_check

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *words: object, status: int = 0) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_build_image(tmp_path: Path, image: str) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "f").write_bytes(b"x" * 100_000)
    (source / "a" / "link").symlink_to("f")
    os.link(source / "a" / "f", source / "hard")
    os.chmod(source / "a" / "f", 0o640)
    os.utime(source / "a" / "f", ns=(5, 6))
    assert "MiB are free" in run("build_image.py", source, image, 256)
    with ubtrfs.open(image, read_only=True) as fs:
        for top in ("/root", "/root-original"):
            assert fs.read_bytes(f"{top}/a/f") == b"x" * 100_000 and fs.readlink(f"{top}/a/link") == "f"
            status = fs.stat(f"{top}/hard")
            assert (status.st_nlink, status.st_mode, status.st_mtime_ns) == (2, 0o100640, 6)
    btrfs_check(image)


def test_backup(tmp_path: Path, image: str) -> None:
    backups, restored = tmp_path / "backups", str(tmp_path / "restored.img")
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.create_subvolume("/data")
        fs.write_bytes("/data/large", os.urandom(3 * MIB))
    assert "everything" in run("backup.py", "save", image, "/data", backups)
    for day in range(2):
        with ubtrfs.open(image) as fs:
            fs.write_bytes("/data/day", str(day).encode())
        assert "the difference to" in run("backup.py", "save", image, "/data", backups)
    sizes = [(backups / f"{number:04}.btrfs").stat().st_size for number in (1, 2, 3)]
    assert sizes[0] > 3 * MIB and max(sizes[1:]) < 100_000
    with ubtrfs.open(image, read_only=True) as fs:
        assert fs.listdir("/.backups") == ["3"]
        large = fs.read_bytes("/data/large")
    run("backup.py", "restore", backups, restored)
    with ubtrfs.open(restored, read_only=True) as fs:
        assert fs.listdir("/") == ["1", "2", "3"]
        assert fs.read_bytes("/3/day") == b"1" and fs.read_bytes("/3/large") == large and not fs.exists("/1/day")
    btrfs_check(restored)


def test_rescue(tmp_path: Path, image: str) -> None:
    good, bad = os.urandom(MIB), os.urandom(MIB)
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.makedirs("/a/b")
        fs.write_bytes("/a/good", good)
        fs.write_bytes("/a/b/bad", bad)
        fs.symlink("good", "/a/link")
    run("rescue.py", image, tmp_path / "all")
    # One sector of one file is damaged.
    content = bytearray(Path(image).read_bytes())
    at = content.find(bad[:64]) + 40 * 4096
    content[at] ^= 1
    Path(image).write_bytes(content)
    out = run("rescue.py", image, tmp_path / "rescued", status=1)
    assert "2 files were copied, 1 problems" in out
    rescued = tmp_path / "rescued" / "a"
    assert (rescued / "good").read_bytes() == good and os.readlink(rescued / "link") == "good"
    expected = bytearray(bad)
    expected[40 * 4096 : 41 * 4096] = bytes(4096)
    assert (rescued / "b" / "bad").read_bytes() == bytes(expected)


def test_browse_snapshots(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.create_subvolume("/data")
        for day in ("monday", "tuesday", "wednesday"):
            if day != "tuesday":
                fs.write_bytes("/data/report", day.encode())
            fs.snapshot("/data", f"/{day}", read_only=True)
    listed = run("browse_snapshots.py", image)
    assert "read-only monday: snapshot of data" in listed and "writable  data: subvolume" in listed
    versions = run("browse_snapshots.py", image, "report")
    assert versions.count("sha256") == 2 and "tuesday: 6 bytes" in versions and "same as before" in versions
    assert run("browse_snapshots.py", image, "report", "tuesday") == "monday"


def test_memory_image() -> None:
    run("memory_image.py")


def test_walk(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.makedirs("/a/b")
        fs.write_bytes("/a/b/f", b"12345")
        fs.symlink("b", "/a/link")
    assert run("walk.py", image).startswith("1 files with 5 bytes")
