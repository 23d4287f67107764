"""Mounting for all programs, by FUSE."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ubtrfs
from conftest import MIB, btrfs_check, missing


@pytest.fixture
def point(tmp_path: Path) -> Iterator[str]:
    """An empty directory, where FUSE is there."""
    if shutil.which("ubtrfs") is None:
        missing("the program ubtrfs in PATH")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("/dev/fuse")
    where = tmp_path / "point"
    where.mkdir()
    yield str(where)
    assert not os.path.ismount(where), "a test leaves nothing mounted"


def test_all_programs_use_the_files_of_a_mount(image: str, point: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.create_subvolume("/home")
        fs.write_bytes("/home/f", b"old")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with ubtrfs.mount(image, point, subvol="/home", options="compress=zstd", memory=200 * MIB) as path:
        assert path == point and Path(path, "f").read_bytes() == b"old"
        subprocess.run(["cp", "-a", "/usr/include/linux", path], check=True)
        os.mkfifo(os.path.join(path, "pipe"))
        with pytest.raises(OSError) as caught:
            ubtrfs.open(image)
        assert caught.value.errno == errno.EBUSY
        assert before == {number: signal.getsignal(number) for number in before}
    with ubtrfs.open(image, read_only=True, subvol="/home") as fs:
        for top, _, files in os.walk("/usr/include/linux"):
            for name in files:
                inside = os.path.join("/linux", os.path.relpath(top, "/usr/include/linux"), name)
                assert fs.read_bytes(inside) == Path(top, name).read_bytes()
    btrfs_check(image)


def test_an_exception_in_the_block_unmounts_too(image: str, point: str) -> None:
    ubtrfs.make(image, size=256 * MIB).close()
    with pytest.raises(KeyError), ubtrfs.mount(image, Path(point)) as path:
        Path(path, "kept").write_bytes(b"kept")
        raise KeyError
    assert not os.path.ismount(point)
    # A file that is still open, as in the frame of an exception, does not hold the mount.
    with pytest.raises(KeyError), ubtrfs.mount(image, point) as path:
        file = open(os.path.join(path, "used"), "wb")
        file.write(b"used")
        file.flush()
        raise KeyError
    assert not os.path.ismount(point)
    file.close()
    for _ in range(200):
        try:
            fs = ubtrfs.open(image)
            break
        except OSError as error:
            assert error.errno == errno.EBUSY
            time.sleep(0.05)
    with fs:
        assert (fs.read_bytes("/kept"), fs.read_bytes("/used")) == (b"kept", b"used")
    btrfs_check(image)


def test_a_mount_that_is_in_use_stays_until_it_is_free(image: str, point: str) -> None:
    ubtrfs.make(image, size=256 * MIB).close()
    mount = ubtrfs.mount(image, point)
    with open(os.path.join(point, "f"), "wb"):
        with pytest.raises(OSError) as caught:
            mount.unmount()
        assert caught.value.errno == errno.EBUSY and mount.is_mounted
    mount.unmount()
    mount.unmount()
    assert not mount.is_mounted
    with ubtrfs.mount(image, point, read_only=True) as path, pytest.raises(OSError) as caught:
        Path(path, "g").write_bytes(b"")
    assert caught.value.errno == errno.EROFS


def test_what_cannot_be_mounted_is_named(image: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="cannot mount"):
        ubtrfs.mount(image, point)
    ubtrfs.make(image, size=256 * MIB).close()
    with pytest.raises(FileNotFoundError, match="cannot mount"):
        ubtrfs.mount(image, point + "-missing")
    with pytest.raises(OSError, match="nonsense"):
        ubtrfs.mount(image, point, options="nonsense")
    with open(image, "r+b") as file, pytest.raises(TypeError, match="give a path"):
        ubtrfs.mount(file, point)
    with pytest.raises(ValueError, match="comma"):
        ubtrfs.mount(image, point, subvol="a,b")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="needs the program ubtrfs"):
        ubtrfs.mount(image, point)


def test_ctrl_c_in_the_block_unmounts(image: str, point: str) -> None:
    ubtrfs.make(image, size=256 * MIB).close()
    program = """
        import os, signal, sys, ubtrfs
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ubtrfs.mount(sys.argv[1], sys.argv[2]) as path:
            open(os.path.join(path, "f"), "wb").write(b"text")
            # As a terminal does: the signal goes to the whole group of processes.
            os.killpg(0, signal.SIGINT)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), image, point],
        capture_output=True, text=True, timeout=120, start_new_session=True, check=False,
    )
    assert done.returncode in (130, -signal.SIGINT) and "KeyboardInterrupt" in done.stderr, done
    with ubtrfs.open(image) as fs:
        assert fs.read_bytes("/f") == b"text"
