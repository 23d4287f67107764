"""Backs up a subvolume of an image into a directory of streams, each the difference to the one before.

python backup.py save IMAGE SUBVOLUME DIRECTORY
python backup.py restore DIRECTORY IMAGE      makes the image, with one snapshot for each backup

A stream appears in the directory only when it is complete and durable. The snapshots that were sent stay in the image, in
/.backups; the newest is the parent of the next backup.
"""

import os
import sys

import ubtrfs

SNAPSHOTS = "/.backups"


def numbers(names: list[str]) -> list[int]:
    return sorted(int(name.partition(".")[0]) for name in names if name.partition(".")[0].isdigit())


def save(image: str, subvolume: str, directory: str) -> None:
    os.makedirs(directory, exist_ok=True)
    saved = numbers([name for name in os.listdir(directory) if name.endswith(".btrfs")])
    with ubtrfs.open(image) as fs:
        fs.makedirs(SNAPSHOTS, exist_ok=True)
        kept = [number for number in numbers(fs.listdir(SNAPSHOTS)) if number in saved]
        for number in numbers(fs.listdir(SNAPSHOTS)):
            # A snapshot whose backup did not end.
            if number not in saved:
                fs.delete_subvolume(f"{SNAPSHOTS}/{number}")
        number = max(saved, default=0) + 1
        fs.snapshot(subvolume, f"{SNAPSHOTS}/{number}", read_only=True)
        parent = f"{SNAPSHOTS}/{kept[-1]}" if kept else None
        path = os.path.join(directory, f"{number:04}.btrfs")

        def show(done: int) -> None:
            print(f"\r{done >> 10} KiB", end="", file=sys.stderr)

        with open(f"{path}.part", "wb") as out:
            with fs.send(f"{SNAPSHOTS}/{number}", parent=parent, progress=show) as stream:
                while data := stream.read(1 << 20):
                    out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.rename(f"{path}.part", path)
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for old in kept:
            fs.delete_subvolume(f"{SNAPSHOTS}/{old}")
    print(f"\n{path}: {os.path.getsize(path)} bytes, {'the difference to ' + parent if parent else 'everything'}")


def restore(directory: str, image: str) -> None:
    with ubtrfs.make(image, size=1 << 30) as fs:
        for name in sorted(name for name in os.listdir(directory) if name.endswith(".btrfs")):
            with open(os.path.join(directory, name), "rb") as stream:
                for subvolume in fs.receive(stream, verify=True).subvolumes:
                    print(f"restored /{subvolume.path}")


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(*sys.argv[2:])
    else:
        restore(*sys.argv[2:])
