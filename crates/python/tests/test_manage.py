"""Balance, scrub, devices, quotas, space; and how long work is watched and cancelled."""

from __future__ import annotations

import errno
import io
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import ubtrfs
from conftest import MIB, btrfs_check


def data_profiles(fs: ubtrfs.Filesystem) -> set[str]:
    return {group.profile for group in fs.manage.space_usage().groups if group.type == "data"}


def test_a_balance_converts_and_frees(image: str) -> None:
    with ubtrfs.make(image, size=1 << 30) as fs:
        for number in range(8):
            fs.write_bytes(f"/{number}", os.urandom(MIB))
        told: list[int] = []
        job = ubtrfs.Job()
        twice = ubtrfs.BalanceFilter(convert="dup", profiles=["single"])
        report = fs.manage.balance(data=twice, progress=told.append, job=job)
        assert report.failures == [] and report.counts.completed >= 1 and report.counts.failed == 0
        assert told == sorted(told) and told[-1] == job.done and not job.is_cancelled
        assert data_profiles(fs) == {"dup"}
        # Nothing is left to convert.
        soft = ubtrfs.BalanceFilter(convert="dup", soft=True)
        assert fs.manage.balance(data=soft).counts.completed == 0
        assert fs.manage.balance_status() is None
        assert fs.manage.balance(data=ubtrfs.BalanceFilter(usage=(0, 1), limit=3, device=1)).counts.failed == 0
        assert fs.manage.balance().counts.completed >= 2
        for call in (fs.manage.resume_balance, fs.manage.pause_balance, fs.manage.cancel_balance):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.ENOTCONN
        with pytest.raises(ValueError, match="raid7"):
            fs.manage.balance(data=ubtrfs.BalanceFilter(convert="raid7"))
        with pytest.raises(OSError):
            fs.manage.balance(metadata=ubtrfs.BalanceFilter(convert="raid1"))
    btrfs_check(image)


def test_a_scrub_repairs_and_names_files(image: str) -> None:
    content = os.urandom(MIB)
    with ubtrfs.make(image, size=256 * MIB, data="dup") as fs:
        fs.write_bytes("/file", content)
    with ubtrfs.make(image + "2", size=256 * MIB) as fs:
        fs.create_subvolume("/sub")
        fs.write_bytes("/sub/file", content)
    for name in (image, image + "2"):
        with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as stored:
            at = stored.find(content[:4096])
            stored[at] ^= 1
    with ubtrfs.open(image) as fs:
        report = fs.manage.scrub(repair=False)
        assert not report.is_clean and report.devices[0].counts.corrected_errors == 1
        report = fs.manage.scrub([1])
        assert report.devices[0].error is None and report.files[0].repaired_bytes == 4096
        assert fs.manage.scrub().is_clean
    with ubtrfs.open(image + "2") as fs:
        report = fs.manage.scrub(progress=lambda done: None)
        assert [(file.path, file.lost_bytes, file.subvolume_id) for file in report.files] == [("sub/file", 4096, 256)]
        assert report.devices[0].counts.uncorrectable_errors == 1
        with pytest.raises(OSError):
            fs.manage.scrub([7])
        with pytest.raises(OSError):
            fs.manage.cancel_scrub()
    btrfs_check(image)


def test_devices_join_leave_and_change(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.img") for number in range(3)]
    storage = io.BytesIO()
    content = os.urandom(3 * MIB)
    with ubtrfs.make(paths[0], size=512 * MIB) as fs:
        fs.write_bytes("/f", content)
        assert fs.manage.add_device(paths[1], size=512 * MIB) == 2
        with pytest.raises(FileExistsError):
            fs.manage.add_device(paths[1], size=512 * MIB)
        with pytest.raises(FileNotFoundError):
            fs.manage.add_device(tmp_path / "missing")
        with pytest.raises(TypeError):
            fs.manage.add_device(5)
        both = ubtrfs.BalanceFilter(convert="raid1")
        fs.manage.balance(data=both, metadata=both, system=both)
        assert data_profiles(fs) == {"raid1"}
        # A device of Python takes the place of a file, and the other way round.
        report = fs.manage.replace_device(2, storage, size=512 * MIB)
        assert report.files == [] and report.counts.uncorrectable_errors == 0
        assert storage.seek(0, io.SEEK_END) == 512 * MIB and fs.read_bytes("/f") == content
        Path(paths[2]).touch()
        os.truncate(paths[2], 600 * MIB)
        fs.manage.replace_device(2, Path(paths[2]), progress=lambda done: None)
        fs.manage.resize_device(2, 600 * MIB)
        devices = fs.manage.space_usage().devices
        assert [(device.id, device.total, device.state) for device in devices] == [
            (1, 512 * MIB, "in sync"), (2, 600 * MIB, "in sync"),
        ]
        assert {share.profile for share in devices[1].groups} == {"raid1"} and devices[1].allocated > 0
        assert fs.manage.min_device_size(2) < 512 * MIB
        fs.manage.resize_device(2, 512 * MIB)
        one = ubtrfs.BalanceFilter(convert="single")
        fs.manage.balance(one, one, one, force=True)
        fs.manage.remove_devices([1])
        with pytest.raises(OSError):
            fs.manage.remove_devices([2])
    btrfs_check(paths[2])
    with ubtrfs.open(paths[2]) as fs:
        assert fs.read_bytes("/f") == content


def test_quotas_count_and_limit(image: str) -> None:
    with ubtrfs.make(image, size=256 * MIB) as fs:
        assert fs.manage.quota_status() is None
        with pytest.raises(ValueError, match="full or simple"):
            fs.manage.enable_quotas("half")
        fs.create_subvolume("/home")
        fs.write_bytes("/home/f", bytes(MIB))
        fs.manage.enable_quotas()
        fs.manage.wait_for_quotas(progress=lambda done: None)
        status = fs.manage.quota_status()
        assert status == ubtrfs.QuotaStatus("full", is_consistent=True, is_counting=False)
        home = fs.subvolume("/home").id
        fs.manage.create_qgroup("1/100")
        fs.manage.assign_qgroup(home, "1/100")
        fs.manage.wait_for_quotas()
        fs.manage.limit_qgroup("1/100", max_referenced=2 * MIB)
        with pytest.raises(OSError) as caught:
            fs.write_bytes("/home/g", bytes(4 * MIB))
        assert caught.value.errno == errno.EDQUOT
        fs.remove("/home/g")
        fs.sync()
        groups = {group.id: group for group in fs.manage.qgroups()}
        assert groups["1/100"].max_referenced == 2 * MIB and groups["1/100"].max_exclusive is None
        assert groups["1/100"].members == [f"0/{home}"] and groups[f"0/{home}"].parents == ["1/100"]
        assert groups[f"0/{home}"].referenced >= MIB
        fs.manage.limit_qgroup("1/100")
        fs.manage.remove_qgroup(home, "1/100")
        fs.manage.destroy_qgroup("1/100")
        with pytest.raises(FileNotFoundError):
            fs.manage.destroy_qgroup("1/100")
        for name in ("", "x", "1/", "1/2/3", "70000/1", "-1", f"1/{1 << 48}"):
            with pytest.raises(ValueError, match="quota group"):
                fs.manage.create_qgroup(name)
        fs.manage.disable_quotas()
        assert fs.manage.quota_status() is None
    btrfs_check(image)
    with ubtrfs.make_in_memory(256 * MIB) as fs:
        fs.manage.enable_quotas("simple")
        assert fs.manage.quota_status() == ubtrfs.QuotaStatus("simple", is_consistent=True, is_counting=False)
        with pytest.raises(OSError):
            fs.manage.enable_quotas("full")


def test_files_are_defragmented_and_free_space_is_trimmed(image: str) -> None:
    with ubtrfs.make(image, size=512 * MIB) as fs:
        with fs.open("/f", "wb", buffering=0) as file:
            for _ in range(64):
                file.write(b"x" * 4096)
                file.sync()
        blocks = fs.stat("/f").st_blocks
        assert fs.manage.defragment("/f", progress=lambda done: None) == 64 * 4096
        fs.write_bytes("/g", b"text " * MIB)
        assert fs.manage.defragment("/g", compress="zstd:3") == 5 * MIB
        assert fs.read_bytes("/g") == b"text " * MIB and fs.stat("/f").st_blocks == blocks
        for method in ("fast", "zstd,ro"):
            with pytest.raises(ValueError):
                fs.manage.defragment("/g", compress=method)
        with pytest.raises(OSError):
            fs.manage.defragment("/")
        assert fs.manage.trim() > 100 * MIB
        usage = fs.manage.space_usage()
        assert usage.global_reserve > 0 and usage.devices[0].total == 512 * MIB and usage.devices[0].path == image
        fs.label = "grün"
        assert fs.label == "grün"
        with pytest.raises(OSError):
            fs.label = "x" * 300
        assert fs.default_subvolume() == 5
        fs.create_subvolume("/system")
        fs.set_default_subvolume("/system")
        assert fs.default_subvolume() == fs.subvolume("/system").id
    with ubtrfs.open(image) as fs:
        assert fs.listdir("/") == [] and fs.label == "grün"
    btrfs_check(image)


class Slow(io.BytesIO):
    """Storage that hands out large reads only slowly, so that work on it takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.pause = threading.Event()
        self.pause.set()

    def read(self, size: int | None = -1, /) -> bytes:
        self.pause.wait(0.05)
        return super().read(size)


def full(storage: io.BytesIO) -> ubtrfs.Filesystem:
    fs = ubtrfs.make(storage, size=1 << 30)
    for number in range(40):
        fs.write_bytes(f"/{number}", os.urandom(MIB))
    fs.sync()
    return fs


class Stop(Exception):
    """Raised by the tests."""


def test_an_exception_of_the_progress_cancels_the_work() -> None:
    storage = Slow()

    def stop(done: int) -> None:
        raise Stop

    with full(storage) as fs:
        storage.pause.clear()
        for work in (fs.manage.balance, fs.manage.scrub, lambda **how: fs.manage.replace_device(1, io.BytesIO(), size=1 << 30, **how)):
            with pytest.raises(Stop):
                work(progress=stop)
        storage.pause.set()
        assert fs.manage.balance_status() is None
        assert fs.manage.scrub().is_clean
    assert ubtrfs.check(storage, data_csums=True).is_clean


def test_another_thread_watches_and_cancels() -> None:
    storage = Slow()
    with full(storage) as fs:
        storage.pause.clear()
        job = ubtrfs.Job()

        def cancel() -> None:
            while job.done == 0:
                time.sleep(0.01)
            job.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(OSError) as caught:
            fs.manage.balance(job=job)
        thread.join()
        assert caught.value.errno == errno.ECANCELED and job.is_cancelled and 0 < job.done <= job.total
        # Work that has not begun ends at once.
        with pytest.raises(OSError) as caught:
            fs.manage.balance(job=job)
        assert caught.value.errno == errno.ECANCELED
        report = fs.manage.scrub(job=job)
        assert report.devices[0].error is not None and not report.is_clean


def test_a_balance_is_paused_and_resumed() -> None:
    storage = Slow()
    with full(storage) as fs:
        storage.pause.clear()
        raised: list[OSError] = []

        def balance() -> None:
            try:
                fs.manage.balance()
            except OSError as error:
                raised.append(error)

        thread = threading.Thread(target=balance)
        thread.start()
        while fs.manage.balance_status() is None and thread.is_alive():
            time.sleep(0.01)
        fs.manage.pause_balance()
        thread.join()
        assert raised[0].errno == errno.ECANCELED
        status = fs.manage.balance_status()
        assert status is not None and status.state == "paused"
        storage.pause.set()
        assert fs.manage.resume_balance().failures == [] and fs.manage.balance_status() is None
    assert ubtrfs.check(storage, data_csums=True).is_clean


def test_ctrl_c_cancels_the_work(tmp_path: Path) -> None:
    program = """
        import signal, sys, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import ubtrfs
        from test_manage import Slow, full
        storage = Slow()
        fs = full(storage)
        storage.pause.clear()
        threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            fs.manage.scrub(bytes_per_second=1 << 20)
        except KeyboardInterrupt:
            assert 0.4 < time.monotonic() - begin < 20
            storage.pause.set()
            fs.write_bytes("/after", b"goes on")
            fs.close()
            assert ubtrfs.check(storage).is_clean
            sys.exit(7)
    """
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 7, done.stdout + done.stderr


def test_a_closed_filesystem_is_not_managed() -> None:
    fs = ubtrfs.make_in_memory(256 * MIB)
    manage = fs.manage
    fs.close()
    for call in (manage.balance, manage.space_usage, manage.trim, manage.qgroups):
        with pytest.raises(ValueError, match="closed"):
            call()
