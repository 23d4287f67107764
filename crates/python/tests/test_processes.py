"""The end of an interpreter, forks, and interrupts while a device works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ubtrfs
from conftest import MIB, btrfs_check

SIZE = 256 * MIB


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def test_each_filesystem_is_closed_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    done = run(
        """
        import ubtrfs
        class Bad:
            size = 256 << 20
            bad = False
            def __init__(self): self.content = bytearray(self.size)
            def read_at(self, offset, length): return bytes(self.content[offset:offset + length])
            def write_at(self, offset, data):
                if self.bad: raise OSError(5, "worn out")
                self.content[offset:offset + len(data)] = data
            def flush(self): pass
        kept = []
        for number in range(3):
            device = Bad()
            kept.append(ubtrfs.make(device))
            kept[-1].write_bytes("/f", b"1")
            device.bad = True
            kept.append(ubtrfs.make(f"{number}.img", size=256 << 20))
            kept[-1].write_bytes("/precious", b"kept")
        """,
        tmp_path,
    )
    assert done.returncode == 0 and done.stderr.count("worn out") >= 3, done.stderr
    for number in range(3):
        with ubtrfs.open(tmp_path / f"{number}.img") as fs:
            assert fs.read_bytes("/precious") == b"kept"


@pytest.mark.parametrize("way", ["plain", "with", "file", "closes"])
def test_a_forked_child_leaves_the_filesystem_to_its_parent(tmp_path: Path, way: str) -> None:
    program = {
        "plain": "if os.fork() == 0: sys.exit(3)",
        "with": "with fs:\n    if os.fork() == 0: sys.exit(3)\n    print(os.wait()[1] >> 8)\n    sys.exit()",
        "file": "file = fs.open('/g', 'wb'); file.write(b'x')\nif os.fork() == 0: del fs, file; sys.exit(3)",
        "closes": "if os.fork() == 0: fs.close(); sys.exit(3)",
    }[way]
    done = run(
        "import os, sys, ubtrfs\nfs = ubtrfs.make('f.img', size=256 << 20)\nfs.write_bytes('/b', b'unsynced' * 1000)\n"
        + program
        + "\nprint(os.wait()[1] >> 8)\nfs.close()\n",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", ""), done
    with ubtrfs.open(tmp_path / "f.img", read_only=True) as fs:
        assert fs.read_bytes("/b") == b"unsynced" * 1000
    btrfs_check(tmp_path / "f.img")


class Interrupted:
    """A device whose methods are interrupted by Ctrl-C as often as `left` says."""

    size = SIZE

    def __init__(self) -> None:
        self.content = bytearray(SIZE)
        self.left = 0

    def interrupt(self) -> None:
        if self.left:
            self.left -= 1
            # The handler of Python raises KeyboardInterrupt in the main thread.
            signal.raise_signal(signal.SIGINT)

    def read_at(self, offset: int, length: int) -> bytes:
        self.interrupt()
        return bytes(self.content[offset : offset + length])

    def write_at(self, offset: int, data: bytes) -> None:
        half = len(data) // 2
        self.content[offset : offset + half] = data[:half]
        self.interrupt()
        self.content[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.interrupt()


def test_an_interrupt_reaches_the_caller_and_the_filesystem_goes_on() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        device = Interrupted()
        fs = ubtrfs.make(device)
        for count in (1, 3):
            fs.write_bytes("/f", os.urandom(100_000))
            device.left = count
            with pytest.raises(KeyboardInterrupt):
                # A thread of the engine may take the first one, which then comes between two statements.
                fs.sync()
                device.left = max(device.left, 1)
                device.interrupt()
            device.left = 0
        fs.write_bytes("/g", b"goes on")
        fs.close()
        with ubtrfs.open(device) as fs:
            assert fs.read_bytes("/g") == b"goes on"
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_device_that_only_raises_interrupts_fails() -> None:
    device = Interrupted()
    fs = ubtrfs.make(device)
    fs.write_bytes("/f", b"text")

    class Stop(BaseException):
        pass

    def flush() -> None:
        raise Stop

    device.flush = flush  # type: ignore[method-assign]
    with pytest.raises(Stop):
        fs.sync()
    with pytest.raises(OSError) as caught:
        fs.write_bytes("/g", b"")
        fs.sync()
    assert caught.value.errno == errno.EROFS
    with pytest.raises((OSError, Stop)):
        fs.close()
