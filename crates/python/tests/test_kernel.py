"""Linux mounts what Python makes, and has the same tree; and the other way round."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from typing import Any

import ubtrfs
from conftest import MIB, btrfs_check


def fill(fs: ubtrfs.Filesystem) -> None:
    rng = random.Random(3)
    fs.create_subvolume("/sub")
    for top in ("/", "/sub"):
        for number in range(20):
            folder = os.path.join(top, f"dir-{number}")
            fs.mkdir(folder, rng.choice([0o755, 0o700, 0o1777]))
            for name in (b"\xff\xfe", "gr\u00fcn".encode(), b"plain", b"new\nline"):
                path = os.path.join(os.fsencode(folder), name)
                fs.write_bytes(path, rng.randbytes(rng.choice([0, 17, 2049, 100_000])))
                fs.chown(path, rng.randrange(2000), rng.randrange(2000))
                fs.chmod(path, rng.choice([0o644, 0o600, 0o4755]))
                fs.utime(path, ns=(rng.randrange(10**18), rng.randrange(10**18)))
                fs.setxattr(path, "user.number", str(number).encode())
            fs.link(os.path.join(folder, "plain"), os.path.join(folder, "hard"))
            fs.symlink("plain", os.path.join(folder, "soft"))
        with fs.open(os.path.join(top, "sparse"), "wb") as file:
            file.seek(5 * MIB)
            file.write(b"end")
    fs.snapshot("/sub", "/kept", read_only=True)


def tree(module: Any, top: bytes) -> dict[bytes, Any]:
    """What `module`, which is `os` or a filesystem, tells of a tree."""
    found: dict[bytes, Any] = {}
    for path, dirs, files in module.walk(top):
        for name in [*dirs, *files]:
            whole = os.path.join(path, name)
            status = module.lstat(whole)
            about: list[Any] = [status.st_mode, status.st_uid, status.st_gid, status.st_nlink]
            is_link = stat.S_ISLNK(status.st_mode)
            if not stat.S_ISDIR(status.st_mode):
                about += [status.st_size, status.st_ino]
            if stat.S_ISREG(status.st_mode):
                about.append(status.st_mtime_ns)
                if module is os:
                    with open(whole, "rb") as file:
                        about.append(file.read())
                    about.append({name: os.getxattr(whole, name) for name in os.listxattr(whole)})
                else:
                    about.append(module.read_bytes(whole))
                    about.append({name: module.getxattr(whole, name) for name in module.listxattr(whole)})
            if is_link:
                about.append(module.readlink(whole))
            found[os.path.relpath(whole, top)] = about
    return found


def test_linux_sees_the_tree_that_python_made(image: str, mounted: Any) -> None:
    with ubtrfs.make(image, size=512 * MIB, options="compress=zstd") as fs:
        fill(fs)
        ours = tree(fs, b"/")
    btrfs_check(image)
    theirs = tree(os, os.fsencode(mounted(image)))
    assert len(ours) > 300 and ours == theirs


def test_python_sees_the_tree_that_linux_made(image: str, tmp_path: Any, mounted: Any) -> None:
    mounted_first = mounted  # Skips without root, before anything is made.
    with open(image, "wb") as file:
        file.truncate(256 * MIB)
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "f").write_bytes(b"x" * 10_000)
    (source / "a" / "link").symlink_to("f")
    os.link(source / "a" / "f", source / "a" / "b" / "hard")
    subprocess.run(["mkfs.btrfs", "-q", "--rootdir", str(source), image], check=True)
    point = os.fsencode(mounted_first(image))
    theirs = tree(os, point)
    with open(image, "rb") as file, ubtrfs.open(file, read_only=True) as fs:
        assert tree(fs, b"/") == theirs
