"""Builds a btrfs image from a directory: python build_image.py DIRECTORY IMAGE [SIZE_IN_MIB]

Content, links, permissions, owners, times and extended attributes are kept. The files are in the subvolume /root, of which
the read-only snapshot /root-original is made.
"""

import os
import stat
import sys

import ubtrfs


def copy(source: bytes, fs: ubtrfs.Filesystem, target: bytes, links: dict[tuple[int, int], bytes]) -> None:
    status = os.lstat(source)
    first = links.setdefault((status.st_dev, status.st_ino), target)
    if stat.S_ISDIR(status.st_mode):
        if not fs.isdir(target):
            fs.mkdir(target)
        for name in sorted(os.listdir(source)):
            copy(os.path.join(source, name), fs, os.path.join(target, name), links)
    elif first != target:
        fs.link(first, target)
    elif stat.S_ISLNK(status.st_mode):
        fs.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode):
        with open(source, "rb") as content, fs.open(target, "wb") as file:
            while data := content.read(1 << 20):
                file.write(data)
    else:
        print(f"left out: {os.fsdecode(source)} is neither a file, a directory nor a link", file=sys.stderr)
        return
    fs.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        fs.chmod(target, status.st_mode)
        for attribute in os.listxattr(source):
            fs.setxattr(target, attribute, os.getxattr(source, attribute))
    fs.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def main(directory: str, image: str, mib: str = "1024") -> None:
    with ubtrfs.make(image, size=int(mib) << 20, options="compress=zstd") as fs:
        fs.create_subvolume("/root")
        copy(os.fsencode(directory), fs, b"/root", {})
        fs.snapshot("/root", "/root-original", read_only=True)
        print(f"{fs.usage().free >> 20} MiB are free")


if __name__ == "__main__":
    main(*sys.argv[1:])
