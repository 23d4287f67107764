"""Shows the snapshots of an image, and the versions of a file in them.

python browse_snapshots.py IMAGE                 lists subvolumes and snapshots
python browse_snapshots.py IMAGE PATH            lists the versions of a file, relative to its subvolume
python browse_snapshots.py IMAGE PATH SNAPSHOT   writes the file of one snapshot to the output
"""

import hashlib
import shutil
import sys
from datetime import datetime

import ubtrfs


def shown(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds // 1_000_000_000).isoformat(" ")


def list_subvolumes(fs: ubtrfs.Filesystem) -> None:
    names = {subvolume.uuid: subvolume.path or "/" for subvolume in fs.subvolumes()}
    for subvolume in fs.subvolumes():
        source = names.get(subvolume.parent_uuid) if subvolume.parent_uuid else None
        kind = f"snapshot of {source}" if source else "subvolume"
        access = "read-only" if subvolume.read_only else "writable"
        print(f"{subvolume.id:6} {shown(subvolume.created_ns)} {access:9} {subvolume.path or '/'}: {kind}")


def list_versions(fs: ubtrfs.Filesystem, path: str) -> None:
    last = None
    for subvolume in sorted(fs.subvolumes(), key=lambda subvolume: subvolume.generation):
        file = fs.path(subvolume.path) / path.lstrip("/")
        if not file.is_file():
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        change = "same as before" if digest == last else f"sha256 {digest}"
        print(f"{subvolume.path or '/'}: {file.stat().st_size} bytes, {shown(file.stat().st_mtime_ns)}, {change}")
        last = digest


def main(image: str, path: str = "", snapshot: str = "") -> None:
    # The top level, so that every subvolume can be reached.
    with ubtrfs.open(image, read_only=True, options="subvolid=5") as fs:
        if not path:
            list_subvolumes(fs)
        elif not snapshot:
            list_versions(fs, path)
        else:
            with (fs.path(snapshot) / path.lstrip("/")).open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
