"""Builds a btrfs image from a directory: python build_image.py DIRECTORY IMAGE [SIZE_IN_MIB]

Content, links, permissions, owners, times and extended attributes are kept. The files are in the subvolume /root, of which
the read-only snapshot /root-original is made.
"""

import sys

import ubtrfs


def main(directory: str, image: str, mib: str = "1024") -> None:
    with ubtrfs.make(image, size=int(mib) << 20, options="compress=zstd") as fs:
        fs.create_subvolume("/root")
        report = fs.copy_from_host(directory, "/root")
        for failure in report.failures:
            print(failure, file=sys.stderr)
        fs.snapshot("/root", "/root-original", read_only=True)
        print(f"{report.files} files, {fs.usage().free >> 20} MiB are free")
    if report.failures:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
