"""Subvolumes, snapshots, transactions, and options of filesystems."""

from __future__ import annotations

import contextlib
import errno
import io
import uuid
from pathlib import Path

import pytest

import ubtrfs
from ubtrfs import FileObjectDevice
from conftest import MIB, btrfs_check


def test_snapshots_keep_what_was_there(fs: ubtrfs.Filesystem) -> None:
    fs.create_subvolume("/data")
    fs.write_bytes("/data/f", b"draft")
    fs.snapshot("/data", "/kept", read_only=True)
    fs.snapshot("/data", "/draft")
    fs.write_bytes("/data/f", b"final")
    fs.write_bytes("/draft/f", b"other")
    assert [fs.read_bytes(f"/{name}/f") for name in ("data", "kept", "draft")] == [b"final", b"draft", b"other"]
    with pytest.raises(OSError) as caught:
        fs.write_bytes("/kept/f", b"")
    assert caught.value.errno == errno.EROFS
    fs.set_read_only("/kept", False)
    fs.write_bytes("/kept/f", b"")
    fs.set_read_only("/kept")
    data, kept = fs.subvolume("/data"), fs.subvolume("/kept")
    assert (kept.parent_uuid, kept.read_only, kept.parent_id, kept.path) == (data.uuid, True, 5, "kept")
    assert isinstance(data.uuid, uuid.UUID) and data.parent_uuid is None and data.received_uuid is None
    assert data.created_ns > 1_500_000_000 * 10**9 and data.generation > 0
    assert [subvolume.path for subvolume in fs.subvolumes()] == ["", "data", "kept", "draft"]
    assert fs.is_subvolume("/data") and not fs.is_subvolume("/data/f") and not fs.is_subvolume("/none")
    fs.delete_subvolume("/draft")
    assert fs.listdir("/") == ["data", "kept"]
    with pytest.raises(OSError):
        fs.subvolume("/data/f")


def test_a_subvolume_can_be_the_root(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.create_subvolume("/home")
        fs.write_bytes("/home/f", b"text")
    with ubtrfs.open(image, read_only=True, subvol="/home") as fs:
        assert fs.listdir("/") == ["f"]
    with ubtrfs.open(image, options="ro,subvol=home") as fs:
        assert fs.listdir("/") == ["f"]
        assert fs.read_only_reason is not None


def test_a_transaction_is_all_or_nothing(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        with fs.transaction():
            fs.write_bytes("/one", b"1")
            fs.write_bytes("/two", b"2")
    fs = ubtrfs.open(image)
    with pytest.raises(KeyError), fs.transaction():
        fs.remove("/one")
        raise KeyError
    with pytest.raises(OSError, match="transaction") as caught:
        fs.write_bytes("/three", b"")
    assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError):
        fs.sync()
    fs.close()
    with ubtrfs.open(image) as fs:
        assert fs.listdir("/") == ["one", "two"]
    btrfs_check(image)


def test_the_exception_of_a_transaction_is_what_the_program_sees(image: str) -> None:
    ubtrfs.make(image, size=256 * MIB).close()

    def fail(fs: ubtrfs.Filesystem) -> None:
        with fs.transaction():
            fs.write_bytes("/f", b"lost")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught, ubtrfs.open(image) as fs:
        fail(fs)
    assert caught.value.__context__ is None
    with pytest.raises(KeyError, match="mine") as caught:
        fs = ubtrfs.open(image)
        try:
            fail(fs.with_caller(1000, 1000))
        finally:
            fs.close()
    assert caught.value.__context__ is None
    # The frames of the exception have the second handle, which keeps the image open.
    del caught
    # The program has handled the exception.
    with ubtrfs.open(image) as fs:
        with pytest.raises(KeyError):
            fail(fs)
    # The block closes the filesystem, which undoes the changes.
    fs = ubtrfs.open(image)
    with pytest.raises(OSError, match="transaction"), fs.transaction():
        fs.write_bytes("/g", b"")
        fs.close()
    with ubtrfs.open(image) as fs:
        assert fs.listdir("/") == []


def test_an_interrupt_of_a_device_does_not_hide_the_exception_of_a_transaction() -> None:
    class Interrupted(FileObjectDevice):
        wants = False

        def write_at(self, offset: int, data: bytes) -> None:
            if self.wants:
                self.wants = False
                raise KeyboardInterrupt
            super().write_at(offset, data)

    device = Interrupted(io.BytesIO(), 256 * MIB)
    fs = ubtrfs.make(device)
    with pytest.raises(KeyError), fs.transaction():
        # A thread writes the data.
        fs.write_bytes("/f", bytes(100 * MIB))
        device.wants = True
        raise KeyError
    with contextlib.suppress(KeyboardInterrupt):
        fs.close()


def test_a_failed_transaction_that_changed_nothing_ends_nothing(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB, options="strictatime") as fs:
        fs.create_subvolume("/sub")
        fs.write_bytes("/f", b"text")
        fs.delete_subvolume("/sub")
        with pytest.raises(KeyError), fs.transaction():
            assert fs.read_bytes("/f") == b"text" and fs.listdir("/") == ["f"]
            raise KeyError
        fs.write_bytes("/g", b"goes on")
        fs.create_subvolume("/other")
        with pytest.raises(FileNotFoundError), fs.transaction():
            fs.remove("/missing")
        with fs.transaction():
            fs.remove("/f")
    with ubtrfs.open(image) as fs:
        assert fs.listdir("/") == ["g", "other"] and fs.read_bytes("/g") == b"goes on"
    btrfs_check(image)


def test_options_of_a_new_filesystem_are_honoured(image: str) -> None:
    fsid = uuid.uuid4()
    with ubtrfs.make(
        image, size=256 * MIB, label="grün", uuid=fsid, csum="xxhash", nodesize=32768, metadata="single",
        root_owner=(1000, 100), created_ns=10**18, options="compress=zstd", memory=64 * MIB,
    ) as fs:
        assert fs.label == "grün" and fs.stat("/").st_uid == 1000 and fs.stat("/").st_mtime_ns == 10**18
        usage = fs.usage()
        assert usage.total == 256 * MIB and usage.available < usage.total and usage.free < usage.total
        with pytest.raises(OSError) as caught:
            ubtrfs.open(image)
        assert caught.value.errno == errno.EBUSY
    btrfs_check(image)
    for keywords in [{"csum": "md5"}, {"data": "raid7"}, {"uuid": "x"}]:
        with pytest.raises(ValueError):
            ubtrfs.make(image, force=True, **keywords)
    with pytest.raises(FileExistsError):
        ubtrfs.make(image, size=256 * MIB)
    with pytest.raises(OSError, match="force|overwrit"):
        ubtrfs.make(image)
    with ubtrfs.make(image, force=True) as fs:
        assert fs.label == ""
    with pytest.raises(OSError, match="unknown"):
        ubtrfs.open(image, options="nonsense")


def test_two_devices_make_one_filesystem(tmp_path: object) -> None:
    paths = [f"{tmp_path}/disk-{number}.img" for number in range(2)]
    with ubtrfs.make(paths, size=256 * MIB, data="raid1") as fs:
        fs.write_bytes("/f", b"on both")
    with ubtrfs.open(paths[0], devices=paths[1:]) as fs:
        assert fs.read_bytes("/f") == b"on both"
    assert ubtrfs.check(paths, data_csums=True).is_clean


def test_check_tells_problems(image: str) -> None:
    ubtrfs.make(image, size=256 * MIB).close()
    assert ubtrfs.check(image).is_clean
    with open(image, "r+b") as file:
        file.seek(64 << 20)
        file.write(b"\xff" * 4096)
    report = ubtrfs.check(image)
    assert not report.is_clean and report.is_complete
    assert [problem.code for problem in report.problems] == ["E-SUPER-MIRROR"] and report.problems[0].is_damage
    with pytest.raises(FileNotFoundError):
        ubtrfs.check(image + ".missing")


def test_damage_is_a_corruption_error_that_names_the_place(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB, metadata="single") as fs:
        for number in range(2000):
            fs.write_bytes(f"/file-{number}", b"x" * 100)
    content = bytearray(Path(image).read_bytes())
    # The names and inline data of the files lie in leaves. A byte of each copy is changed.
    at = content.find(b"file-1234")
    assert at > 0
    while at > 0:
        content[at] ^= 1
        at = content.find(b"file-1234", at + 1)
    Path(image).write_bytes(content)
    with ubtrfs.open(image, read_only=True) as fs:
        with pytest.raises(ubtrfs.CorruptionError, match="bytenr|block|tree") as caught:
            for number in range(2000):
                fs.read_bytes(f"/file-{number}")
    assert caught.value.errno == errno.EIO or caught.value.errno == errno.EUCLEAN
