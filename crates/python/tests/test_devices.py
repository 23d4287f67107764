"""Devices that are objects of Python: file objects, failing devices, threads, and power cuts."""

from __future__ import annotations

import errno
import io
import os
import random
import threading
import time
from pathlib import Path

import pytest

import ubtrfs
from conftest import MIB, btrfs_check

SIZE = 128 * MIB
BLOCK = 4096


class MemoryDisk:
    """A sparse device in memory."""

    size = SIZE
    name = "a disk of the tests"

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def read_at(self, offset: int, length: int) -> bytes:
        with self.lock:
            first, last = offset // BLOCK, (offset + length - 1) // BLOCK
            whole = b"".join(self.blocks.get(at, bytes(BLOCK)) for at in range(first, last + 1))
        start = offset - first * BLOCK
        return whole[start : start + length]

    def write_at(self, offset: int, data: bytes) -> None:
        assert offset % BLOCK == 0 and len(data) % BLOCK == 0, "the engine writes whole sectors"
        with self.lock:
            for at in range(0, len(data), BLOCK):
                self.blocks[(offset + at) // BLOCK] = data[at : at + BLOCK]

    def flush(self) -> None:
        pass


class RecordingDisk(MemoryDisk):
    """Also records writes and flushes, in the order in which they ended."""

    def __init__(self) -> None:
        super().__init__()
        #: `None` is a flush.
        self.log: list[tuple[int, bytes] | None] = []

    def write_at(self, offset: int, data: bytes) -> None:
        super().write_at(offset, data)
        with self.lock:
            self.log.append((offset, data))

    def flush(self) -> None:
        with self.lock:
            self.log.append(None)


def test_a_device_in_python_stores_a_filesystem() -> None:
    disk = MemoryDisk()
    assert isinstance(disk, ubtrfs.Device)
    with ubtrfs.make(disk) as fs:
        fs.write_bytes("/f", b"text" * 100_000)
    with ubtrfs.open(disk, read_only=True) as fs:
        assert fs.read_bytes("/f") == b"text" * 100_000
    assert ubtrfs.check(disk, data_csums=True).is_clean


def test_file_objects_store_a_filesystem(tmp_path: Path) -> None:
    for file in [io.BytesIO(), open(tmp_path / "disk.img", "w+b"), open(tmp_path / "raw.img", "w+b", buffering=0)]:
        with ubtrfs.make(file, size=SIZE) as fs:
            fs.write_bytes("/f", b"text")
        with ubtrfs.open(file) as fs:
            assert fs.read_bytes("/f") == b"text"
        assert ubtrfs.check(file).is_clean
        file.close()
    with open(tmp_path / "disk.img", "rb") as file, ubtrfs.open(file, read_only=True) as fs:
        assert fs.read_bytes("/f") == b"text"
        with pytest.raises(OSError) as caught:
            fs.write_bytes("/g", b"")
        assert caught.value.errno == errno.EROFS
    btrfs_check(str(tmp_path / "raw.img"))


def test_what_is_no_device_is_refused() -> None:
    class Half:
        size = SIZE

        def read_at(self, offset: int, length: int) -> bytes:
            return bytes(length)

    for target in [3, None, Half(), object()]:
        with pytest.raises(TypeError):
            ubtrfs.open(target)
    with pytest.raises(OSError):
        ubtrfs.open(MemoryDisk())


def test_an_exception_of_a_device_is_the_cause_of_the_error() -> None:
    class Failing(MemoryDisk):
        failure: Exception | None = None

        def read_at(self, offset: int, length: int) -> bytes:
            if self.failure is not None:
                raise self.failure
            return super().read_at(offset, length)

    disk = Failing()
    with ubtrfs.make(disk) as fs:
        fs.write_bytes("/f", random.Random(1).randbytes(1 * MIB))
    for failure, expected in [(ValueError("no"), errno.EIO), (OSError(errno.ENODEV, "gone"), None)]:
        disk.failure = None
        with ubtrfs.open(disk, read_only=True) as fs:
            disk.failure = failure
            with pytest.raises(OSError) as caught:
                fs.read_bytes("/f")
            assert caught.value.__cause__ is failure
            assert expected is None or caught.value.errno == expected
    disk.failure = None

    class Short(MemoryDisk):
        def read_at(self, offset: int, length: int) -> bytes:
            return super().read_at(offset, length)[:-1]

    short = Short()
    short.blocks = disk.blocks
    with pytest.raises(OSError, match="returned"):
        ubtrfs.open(short)


def test_a_failed_flush_is_reported() -> None:
    class Unsafe(MemoryDisk):
        fails = False

        def flush(self) -> None:
            if self.fails:
                raise OSError(errno.EIO, "the cable is loose")

    disk = Unsafe()
    fs = ubtrfs.make(disk)
    fs.write_bytes("/f", b"text")
    disk.fails = True
    with pytest.raises(OSError) as caught:
        fs.sync()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(OSError):
        fs.close()
    disk.fails = False
    with ubtrfs.open(disk) as fs:
        assert fs.listdir("/") == []


def test_other_threads_run_during_the_work() -> None:
    class Slow(MemoryDisk):
        def flush(self) -> None:
            time.sleep(0.5)

    with ubtrfs.make(Slow()) as fs:
        fs.write_bytes("/f", b"text")
        ticks = 0
        done = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not done.wait(0.005):
                ticks += 1

        thread = threading.Thread(target=tick)
        thread.start()
        fs.sync()
        done.set()
        thread.join()
        assert ticks > 20


def test_many_threads_use_one_filesystem() -> None:
    with ubtrfs.make(MemoryDisk()) as fs:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(20):
                    name = f"/{number}-{turn}"
                    fs.write_bytes(name, name.encode() * 1000)
                    assert fs.read_bytes(name) == name.encode() * 1000
                    if turn % 7 == 0:
                        fs.sync()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [] and len(fs.listdir("/")) == 160


def record_history(disk: RecordingDisk, seed: int) -> list[tuple[int, str, bytes]]:
    """Changes a filesystem. Returns promises: from this length of the log on, the file has this or a later content."""
    rng = random.Random(seed)
    promises: list[tuple[int, str, bytes]] = []
    waiting: dict[str, bytes] = {}
    with ubtrfs.open(disk) as fs:
        fs.create_subvolume("/sub")
        for turn in range(80):
            name = f"/{rng.choice(['', 'sub/'])}file-{rng.randrange(8)}"
            # A later content of a file begins with a higher number.
            data = f"{turn:06}".encode() + rng.randbytes(rng.choice([10, 3000, 70_000]))
            if rng.randrange(3):
                with fs.open(f"{name}.new", "wb", buffering=0) as file:
                    file.write(data)
                    # As with any filesystem, a name could otherwise be durable before the content.
                    file.sync()
                fs.rename(f"{name}.new", name)
            else:
                name = f"{name}-{turn}"
                fs.write_bytes(name, data)
            waiting[name] = data
            choice = rng.randrange(8)
            if choice == 0:
                fs.sync()
                promises += [(len(disk.log), name, data) for name, data in waiting.items()]
                waiting.clear()
            elif choice < 4:
                with fs.open(name, "r+b", buffering=0) as file:
                    file.sync()
                promises.append((len(disk.log), name, data))
                del waiting[name]
            elif choice == 4:
                kept = f"/snapshot-{turn}"
                fs.snapshot("/sub", kept, read_only=True)
                for path, content in waiting.items():
                    if path.startswith("/sub/"):
                        promises.append((len(disk.log), kept + path[4:], content))
    return promises


def test_a_device_in_python_survives_100_power_cuts(tmp_path: Path) -> None:
    disk = RecordingDisk()
    ubtrfs.make(disk).close()
    start = len(disk.log)
    promises = record_history(disk, 1)
    rng = random.Random(2)
    cuts = sorted(rng.randrange(start, len(disk.log) + 1) for _ in range(100))
    nr_kept = done = 0
    # What is durable at the cut, by address, and the writes since the last flush.
    state: dict[int, bytes] = {}
    unflushed: list[tuple[int, bytes]] = []
    image = str(tmp_path / "cut.img")
    for number, cut in enumerate(cuts):
        for entry in disk.log[done:cut]:
            if entry is not None:
                unflushed.append(entry)
                continue
            for offset, data in unflushed:
                state.update((offset + at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
            unflushed = []
        done = cut
        with open(image, "wb") as file:
            file.truncate(SIZE)
            for offset, data in state.items():
                os.pwrite(file.fileno(), data, offset)
            for offset, data in unflushed:
                # A write is kept, dropped or torn. A sector of 4096 bytes, such as the superblock, is whole or missing.
                data = rng.choice([data, b"", data[: rng.randrange(0, len(data), BLOCK)]])
                os.pwrite(file.fileno(), data, offset)
        with ubtrfs.open(image) as fs:
            # The last promise for a name implies those before it.
            kept = {name: data for at, name, data in promises if at <= cut}
            for name, data in kept.items():
                found = fs.read_bytes(name)
                is_kept = found == data or found[:6] > data[:6]
                assert is_kept, f"cut {number} at {cut}: {name} has {found[:6]!r}, promised was {data[:6]!r}"
            nr_kept += len(kept)
        btrfs_check(image)
    assert nr_kept > 500, "the cuts tested few promises"


def test_a_device_that_returns_no_bytes_is_named() -> None:
    class Counts:
        size = 256 * MIB

        def read_at(self, offset: int, length: int) -> int:
            return length

        def write_at(self, offset: int, data: bytes) -> None: ...

        def flush(self) -> None: ...

    with pytest.raises(OSError) as caught:
        ubtrfs.open(Counts())  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_link_has_no_zero_byte(fs: ubtrfs.Filesystem) -> None:
    with pytest.raises(ValueError, match="embedded null byte"):
        fs.symlink("a\0b", "/l")
