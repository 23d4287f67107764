"""Sends and receives as file objects."""

from __future__ import annotations

import errno
import io
import random
import subprocess

import pytest

import ubtrfs
from conftest import MIB, btrfs_check


#: The header of a stream: a magic and a version.
HEADER_BYTES = 17


def fill(fs: ubtrfs.Filesystem) -> None:
    rng = random.Random(7)
    fs.create_subvolume("/data")
    for number in range(30):
        fs.write_bytes(f"/data/file-{number}", rng.randbytes(rng.choice([10, 5000, 300_000])))
    fs.snapshot("/data", "/one", read_only=True)
    for number in range(10):
        fs.remove(f"/data/file-{number}")
    fs.rename("/data/file-20", "/data/moved")
    fs.setxattr("/data/moved", "user.color", b"blue")
    fs.snapshot("/data", "/two", read_only=True)


def content(fs: ubtrfs.Filesystem, top: str) -> dict[str, bytes]:
    return {name: fs.read_bytes(f"{top}/{name}") for name in fs.listdir(top)}


def test_a_stream_goes_whole_and_as_a_difference(fs: ubtrfs.Filesystem) -> None:
    fill(fs)
    sent: list[int] = []
    received: list[int] = []
    with ubtrfs.make_in_memory(256 * MIB) as backup:
        backup.mkdir("/to")
        for name, parent in [("/one", None), ("/two", "/one")]:
            with fs.send(name, parent=parent, version=2, progress=sent.append) as stream:
                report = backup.receive(stream, "/to", verify=True, progress=received.append)
            assert [subvolume.path for subvolume in report.subvolumes] == [name[1:]]
            assert report.subvolumes[0].uuid == fs.subvolume(name).uuid and report.errors == []
            assert stream.bytes_read == sent[-1] == received[-1] and report.nr_commands > 0
            assert report.nr_bytes == stream.bytes_read - HEADER_BYTES
            assert report.subvolumes[0].is_snapshot == (parent is not None)
            assert content(backup, f"/to{name}") == content(fs, name)
        assert backup.getxattr("/to/two/moved", "user.color") == b"blue"
        assert backup.subvolume("/to/two").received_uuid == fs.subvolume("/two").uuid


def test_a_stream_is_read_in_pieces_and_can_be_buffered(fs: ubtrfs.Filesystem) -> None:
    fill(fs)
    whole = fs.send("/one").read()
    assert whole.startswith(b"btrfs-stream\0")
    stream = io.BufferedReader(fs.send("/one"), 1000)
    pieces = []
    while piece := stream.read(777):
        pieces.append(piece)
    stream.close()
    assert b"".join(pieces) == whole
    # A stream that is closed early leaves nothing behind: the subvolume can be deleted.
    early = fs.send("/one")
    early.read(10)
    early.close()
    with pytest.raises(ValueError):
        early.read(1)
    fs.send("/one")
    fs.delete_subvolume("/one")


def test_what_a_program_writes_is_received(fs: ubtrfs.Filesystem) -> None:
    fill(fs)
    whole = fs.send("/one").read()
    with ubtrfs.make_in_memory(256 * MIB) as backup:
        with backup.receiver("/") as out:
            for at in range(0, len(whole), 100_000):
                out.write(memoryview(whole)[at : at + 100_000])
        assert out.report is not None and out.report.nr_bytes == len(whole) - HEADER_BYTES == out.bytes_written - HEADER_BYTES
        assert content(backup, "/one") == content(fs, "/one")


def test_errors_of_streams_are_raised_where_they_are_met(fs: ubtrfs.Filesystem) -> None:
    fill(fs)
    with pytest.raises(PermissionError, match="read-only"):
        fs.send("/data").read()
    with pytest.raises(OSError):
        fs.send("/two", parent="/missing").read()
    whole = fs.send("/one").read()
    difference = fs.send("/two", parent="/one").read()
    with ubtrfs.make_in_memory(256 * MIB) as backup:
        with pytest.raises(FileNotFoundError, match="parent"):
            backup.receive(io.BytesIO(difference))
        with pytest.raises(OSError, match="stream") as caught:
            backup.receive(io.BytesIO(whole[: len(whole) // 2]))
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="not a send stream"):
            backup.receive(io.BytesIO(b"x" * 100))
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        with pytest.raises(OSError, match="crc"):
            backup.receive(io.BytesIO(damaged))
        assert backup.listdir("/") == []


def test_an_exception_of_the_progress_cancels(fs: ubtrfs.Filesystem) -> None:
    fill(fs)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.send("/one", progress=stop).read()
    whole = fs.send("/one").read()
    with ubtrfs.make_in_memory(256 * MIB) as backup:
        with pytest.raises(KeyboardInterrupt):
            backup.receive(io.BytesIO(whole), progress=stop)
        assert backup.listdir("/") == []
        stream = backup.receiver()
        stream.write(whole[:1000])
        stream.cancel()
        assert backup.listdir("/") == []


def test_the_end_of_a_stream_hides_no_exception(fs: ubtrfs.Filesystem) -> None:
    fill(fs)

    def stop(done: int) -> None:
        raise KeyError("mine")

    whole = fs.send("/one").read()
    with ubtrfs.make_in_memory(256 * MIB) as backup:
        for data, progress, expected in [(whole, stop, KeyError), (b"x" * 4_000_000, None, OSError)]:
            stream = backup.receiver(progress=progress)
            with pytest.raises(expected) as caught:
                try:
                    for at in range(0, len(data), 100_000):
                        stream.write(data[at : at + 100_000])
                finally:
                    stream.close()
            assert caught.value.__context__ is None and stream.closed and stream.report is None
        assert backup.listdir("/") == []
    stream = fs.send("/two", parent="/missing")
    with pytest.raises(OSError):
        stream.read(10)
    # An error is not the end of the stream.
    with pytest.raises(ValueError):
        stream.read(10)
    stream.close()


def test_btrfs_receive_understands_the_stream(fs: ubtrfs.Filesystem) -> None:
    fill(fs)
    done = subprocess.run(["btrfs", "receive", "--dump"], input=fs.send("/one").read(), capture_output=True, check=False)
    assert done.returncode == 0 and b"file-29" in done.stdout


def test_a_received_image_is_clean(fs: ubtrfs.Filesystem, image: str) -> None:
    fill(fs)
    with ubtrfs.make(image, size=256 * MIB) as backup:
        backup.receive(fs.send("/one"))
        backup.receive(fs.send("/two", clone_sources=["/one"]))
    btrfs_check(image)
