"""Copies what can be read out of a damaged image: python rescue.py IMAGE DIRECTORY

Nothing is written to the image. Parts of files that cannot be read are zeros in the copy. The exit status is 1 if something
is missing.
"""

import os
import sys
from typing import IO

import ubtrfs

STEP = 4096


class Rescue:
    def __init__(self, fs: ubtrfs.Filesystem, directory: bytes) -> None:
        self.fs, self.directory = fs, directory
        self.files = self.problems = 0

    def problem(self, path: bytes, error: OSError) -> None:
        self.problems += 1
        print(f"{os.fsdecode(path)}: {error}", file=sys.stderr)

    def target(self, path: bytes) -> bytes:
        # A damaged filesystem may have any names. These would lead out of the directory.
        parts = [part for part in path.split(b"/") if part not in (b"", b".", b"..")]
        return os.path.join(self.directory, *parts)

    def everything(self) -> None:
        for top, dirs, files in self.fs.walk(b"/", onerror=lambda error: self.problem(b"a directory", error)):
            os.makedirs(self.target(top), exist_ok=True)
            for name in files + [name for name in dirs if self.fs.islink(os.path.join(top, name))]:
                path = os.path.join(top, name)
                try:
                    self.copy(path)
                except OSError as error:
                    self.problem(path, error)

    def copy(self, path: bytes) -> None:
        if self.fs.islink(path):
            os.symlink(self.fs.readlink(path), self.target(path))
        elif self.fs.isfile(path):
            with self.fs.open(path, "rb", buffering=0) as file, open(self.target(path), "wb") as out:
                self.content(path, file, out)
            self.files += 1

    def content(self, path: bytes, file: IO[bytes], out: IO[bytes]) -> None:
        size, at, failed = self.fs.stat(path).st_size, 0, False
        while at < size:
            length = min(256 * STEP, size - at)
            try:
                out.write(file.read(length))
            except OSError as error:
                if not failed:
                    self.problem(path, error)
                failed = True
                length = self.sectors(file, out, at, length)
            at += length
            file.seek(at)

    def sectors(self, file: IO[bytes], out: IO[bytes], at: int, length: int) -> int:
        """Copies a range in which something is damaged, sector by sector."""
        for offset in range(at, at + length, STEP):
            want = min(STEP, at + length - offset)
            file.seek(offset)
            try:
                out.write(file.read(want))
            except OSError:
                out.write(bytes(want))
        return length


def main(image: str, directory: str) -> int:
    with ubtrfs.open(image, read_only=True, options="rescue=usebackuproot:nologreplay:ignorebadroots") as fs:
        rescue = Rescue(fs, os.fsencode(directory))
        rescue.everything()
    print(f"{rescue.files} files were copied, {rescue.problems} problems")
    return 1 if rescue.problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
