"""A btrfs image in memory for tests: a program that rotates snapshots is tested without root, mounts or files.

python memory_image.py
"""

import io
import unittest

import ubtrfs


def rotate(fs: ubtrfs.Filesystem, subvolume: str, keep: int) -> None:
    """The program that is tested: makes the next read-only snapshot, and keeps only the newest ones."""
    prefix = f"{subvolume}."
    names = [int(name[len(prefix) - 1 :]) for name in fs.listdir("/") if f"/{name}".startswith(prefix)]
    fs.snapshot(subvolume, f"{prefix}{max(names, default=0) + 1}", read_only=True)
    for number in sorted(names)[: max(0, len(names) + 1 - keep)]:
        fs.delete_subvolume(f"{prefix}{number}")


class RotateTest(unittest.TestCase):
    def setUp(self) -> None:
        self.fs = ubtrfs.make_in_memory(256 << 20)
        self.addCleanup(self.fs.close)
        self.fs.create_subvolume("/data")

    def test_the_newest_snapshots_are_kept(self) -> None:
        for day in range(5):
            self.fs.write_bytes("/data/day", str(day).encode())
            rotate(self.fs, "/data", keep=2)
        self.assertEqual(self.fs.listdir("/"), ["data", "data.4", "data.5"])
        self.assertEqual(self.fs.read_bytes("/data.4/day"), b"3")

    def test_a_snapshot_is_read_only(self) -> None:
        rotate(self.fs, "/data", keep=1)
        with self.assertRaises(OSError):
            self.fs.write_bytes("/data.1/f", b"")


class StorageTest(unittest.TestCase):
    def test_an_image_in_a_bytesio_is_clean(self) -> None:
        storage = io.BytesIO()
        with ubtrfs.make(storage, size=128 << 20, label="test") as fs:
            fs.write_bytes("/f", b"text")
        self.assertTrue(ubtrfs.check(storage, data_csums=True).is_clean)
        with ubtrfs.open(storage) as fs:
            self.assertEqual((fs.label, fs.read_bytes("/f")), ("test", b"text"))


if __name__ == "__main__":
    unittest.main()
