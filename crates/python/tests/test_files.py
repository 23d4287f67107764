"""File objects: they do what the built-in `open` does, compared with files of the host."""

from __future__ import annotations

import array
import errno
import io
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

import ubtrfs
from ubtrfs._files import BUFFER_SIZE


def result_of(call: Any) -> Any:
    """The result of a call, or the class of its exception and its errno."""
    try:
        return call()
    except (OSError, ValueError, TypeError) as error:
        return type(error), getattr(error, "errno", None)


@pytest.mark.parametrize("mode", ["r", "r+", "w", "w+", "a", "a+", "x", "x+"])
@pytest.mark.parametrize("buffering", [0, 1 << 10, -1])
def test_random_operations_give_what_a_file_of_the_host_gives(
    fs: ubtrfs.Filesystem, tmp_path: Path, mode: str, buffering: int
) -> None:
    for seed in range(6):
        rng = random.Random(f"{mode} {buffering} {seed}")
        host = tmp_path / f"file-{seed}"
        ours = f"/file-{seed}"
        if "x" not in mode:
            content = rng.randbytes(rng.choice([0, 100, 9000]))
            host.write_bytes(content)
            fs.write_bytes(ours, content)
        # When a buffer is full, an append moves the position. So both have a buffer of one size.
        theirs_buffering = BUFFER_SIZE if buffering == -1 else buffering
        files = [open(host, mode + "b", theirs_buffering), fs.open(ours, mode + "b", buffering)]
        for step in range(40):
            operation = rng.randrange(12)
            size, offset = rng.choice([0, 1, 7, 500, 5000]), rng.randrange(-20, 12000)
            data, whence = rng.randbytes(size), rng.randrange(3)

            def apply(file: Any) -> Any:
                if operation == 0:
                    return file.read(size)
                if operation == 1:
                    return file.read()
                if operation == 2:
                    return file.write(data)
                if operation == 3:
                    return file.seek(offset, whence)
                if operation == 4:
                    return file.tell()
                if operation == 5:
                    return file.truncate(max(offset, 0))
                if operation == 6:
                    return file.truncate()
                if operation == 7:
                    buffer = bytearray(size)
                    return file.readinto(buffer), buffer
                if operation == 8:
                    return file.readline()
                if operation == 9:
                    return file.flush()
                if operation == 10:
                    return file.write(memoryview(array.array("H", range(size))))
                return file.readable(), file.writable(), file.seekable()

            theirs, mine = (result_of(lambda file=file: apply(file)) for file in files)
            assert theirs == mine, f"mode {mode}, buffering {buffering}, seed {seed}, step {step}, op {operation}"
        for file in files:
            file.close()
        assert host.read_bytes() == fs.read_bytes(ours)


def test_modes_are_refused_as_by_open(fs: ubtrfs.Filesystem, tmp_path: Path) -> None:
    fs.write_bytes("/f", b"")
    (tmp_path / "f").touch()
    for mode in ["", "rw", "z", "rr", "rbt", "+", "b", "br", "rb+", "+rb", "U"]:
        theirs = result_of(lambda: open(tmp_path / "f", mode).close())
        assert result_of(lambda: fs.open("/f", mode).close()) == theirs, mode
    for keywords in [{"buffering": 0}, {"mode": "rb", "encoding": "utf-8"}, {"mode": "rb", "newline": ""}]:
        with pytest.raises(ValueError):
            fs.open("/f", **keywords)


def test_text_is_encoded_and_lines_are_translated(fs: ubtrfs.Filesystem) -> None:
    with fs.open("/f", "w", encoding="utf-16", newline="\r\n") as file:
        file.write("grün\nblau\n")
    assert fs.read_bytes("/f") == "grün\r\nblau\r\n".encode("utf-16")
    with fs.open("/f", encoding="utf-16") as file:
        assert file.readlines() == ["grün\n", "blau\n"]
        assert file.mode == "r" and file.name == "/f"
    with fs.open("/f", "w", buffering=1, encoding="ascii", errors="replace") as file:
        file.write("grün\n")
        assert fs.read_bytes("/f") == b"gr?n\n"


def test_the_raw_file_is_a_raw_file(fs: ubtrfs.Filesystem) -> None:
    with fs.open("/f", "w+b", buffering=0) as file:
        assert isinstance(file, io.RawIOBase) and isinstance(file, ubtrfs.RawFile)
        assert file.write(b"abc") == 3 and file.tell() == 3
        assert file.readall() == b"" and file.seek(1) == 1 and file.readall() == b"bc"
        assert file.seek(0) == 0 and file.readlines() == [b"abc"]
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
        with pytest.raises(TypeError):
            file.write("text")
        assert not file.isatty()
    assert file.closed
    for call in [file.read, file.tell, file.readable, lambda: file.write(b""), lambda: file.seek(0), file.truncate]:
        with pytest.raises(ValueError, match="closed file"):
            call()
    file.close()


def test_holes_are_found(fs: ubtrfs.Filesystem) -> None:
    with fs.open("/f", "w+b", buffering=0) as file:
        file.seek(1 << 20)
        file.write(bytes(4096))
        file.truncate(2 << 20)
        assert file.seek(0, os.SEEK_DATA) == 1 << 20
        assert file.seek(0, os.SEEK_HOLE) == 0
        assert file.seek(1 << 20, os.SEEK_HOLE) == (1 << 20) + 4096
        with pytest.raises(OSError) as caught:
            file.seek((1 << 20) + 4096, os.SEEK_DATA)
        assert caught.value.errno == errno.ENXIO
    assert fs.stat("/f").st_blocks == 8


def test_appends_of_two_files_do_not_overwrite_each_other(fs: ubtrfs.Filesystem) -> None:
    with fs.open("/log", "ab", buffering=0) as one, fs.open("/log", "ab", buffering=0) as two:
        for _ in range(10):
            one.write(b"1")
            two.write(b"2")
    assert fs.read_bytes("/log") == b"12" * 10


def test_an_open_file_outlives_its_name(fs: ubtrfs.Filesystem) -> None:
    with fs.open("/f", "w+b", permissions=0o600) as file:
        file.write(b"text")
        file.flush()
        fs.remove("/f")
        file.seek(0)
        assert file.read() == b"text"
        assert file.raw.stat().st_nlink == 0
        assert stat.S_IMODE(file.raw.stat().st_mode) == 0o600


def test_a_file_of_a_closed_filesystem_fails() -> None:
    fs = ubtrfs.make_in_memory(256 << 20)
    file = fs.open("/f", "w+b", buffering=0)
    fs.close()
    with pytest.raises(OSError) as caught:
        file.write(b"late")
    assert caught.value.errno == errno.ESHUTDOWN
    file.close()
    with pytest.raises(ValueError, match="closed filesystem"):
        fs.listdir("/")


def test_large_files_are_read_and_written(fs: ubtrfs.Filesystem) -> None:
    content = random.Random(1).randbytes(20 << 20)
    with fs.open("/large", "wb") as file:
        for at in range(0, len(content), 777_777):
            file.write(content[at : at + 777_777])
    with fs.open("/large", "rb") as file:
        assert file.read() == content
        file.seek(12_345)
        assert file.read(1 << 20) == content[12_345 : 12_345 + (1 << 20)]
    assert fs.read_bytes("/large") == content


def test_a_file_that_does_not_fit_into_memory_is_a_memory_error(fs: ubtrfs.Filesystem) -> None:
    size = 1 << 50
    fs.write_bytes("/f", b"begin")
    fs.truncate("/f", size)
    with pytest.raises(MemoryError, match=f"{size} bytes.*in pieces"):
        fs.read_bytes("/f")
    with fs.open("/f", "rb", buffering=0) as file:
        assert file.read(7) == b"begin\0\0"
        for read in (file.read, lambda: file.read(1 << 49)):
            with pytest.raises(MemoryError):
                read()
        assert file.tell() == 7
        assert file.seek(-2, io.SEEK_END) == size - 2 and file.read() == b"\0\0"
    with fs.open("/f", "rb") as file, pytest.raises(MemoryError):
        file.read()
    # A hole that fits is content.
    fs.truncate("/f", 80 << 20)
    assert fs.read_bytes("/f") == b"begin" + bytes((80 << 20) - 5)


def test_files_share_ranges(fs: ubtrfs.Filesystem) -> None:
    content = random.Random(1).randbytes(1 << 20)
    fs.write_bytes("/a", content)
    with fs.open("/a", "r+b") as a, fs.open("/b", "w+b", buffering=0) as b:
        # What is in the buffer is copied too.
        a.write(b"new")
        content = b"new" + content[3:]
        b.clone_range(a)
        assert fs.read_bytes("/b") == content
        b.clone_range(a, 8192, source_offset=4096, offset=1 << 20)
        assert fs.read_bytes("/b") == content + content[4096:12288]
        # One file may be both.
        b.clone_range(b, 4096, offset=2 << 20)
        assert fs.read_bytes("/b")[2 << 20 :] == content[:4096]
        b.clone_range(a, 0)
        with pytest.raises(OSError) as caught:
            b.clone_range(a, source_offset=1)
        assert caught.value.errno == errno.EINVAL
        fs.write_bytes("/c", content)
        with fs.open("/c", "r+b", buffering=0) as c:
            told: list[int] = []
            assert c.dedupe_range(a, 1 << 20, progress=told.append) and told[-1] == 1 << 20
            c.write(b"x")
            assert not c.dedupe_range(a, 1 << 20) and c.dedupe_range(a, 4096, source_offset=4096, offset=4096)
        with pytest.raises(ValueError, match="closed"):
            b.clone_range(c)
        with fs.open("/c", "rb", buffering=0) as read_only, pytest.raises(io.UnsupportedOperation):
            read_only.clone_range(a)
        with open(__file__, "rb") as host, pytest.raises((TypeError, AttributeError)):
            b.clone_range(host)
        # Inode numbers of another filesystem mean other files.
        with ubtrfs.make_in_memory(256 << 20) as other:
            other.write_bytes("/a", bytes(1 << 20))
            with other.open("/a", "rb") as foreign:
                for call in (b.clone_range, b.dedupe_range):
                    with pytest.raises(OSError) as caught:
                        call(foreign)
                    assert caught.value.errno == errno.EXDEV
