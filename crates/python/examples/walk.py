"""Reads every file of an image, and prints the time that it took: python walk.py IMAGE"""

import os
import stat
import sys
import time

import ubtrfs


def main(image: str) -> None:
    begin = time.perf_counter()
    nr_files = nr_bytes = 0
    with ubtrfs.open(image, read_only=True) as fs:
        for top, dirs, files in fs.walk(b"/"):
            for name in files:
                path = os.path.join(top, name)
                status = fs.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    nr_bytes += len(fs.read_bytes(path))
                    nr_files += 1
    print(f"{nr_files} files with {nr_bytes} bytes in {time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
