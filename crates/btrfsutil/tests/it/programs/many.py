"""Makes many subvolumes and deep ones, finds them as root and as a user, and deletes them: `many.py DIR`."""

import os
import sys

import btrfsutil

os.chdir(sys.argv[1])
top = os.open(".", os.O_RDONLY)


def tried(what, call):
    try:
        print(what, call())
    except btrfsutil.BtrfsUtilError as error:
        print(what, error.btrfsutilerror, error.errno)


def listed(what, *args, **named):
    def found():
        with btrfsutil.SubvolumeIterator(*args, **named) as iterator:
            return [(len(path), path[-40:], id_or_info if isinstance(id_or_info, int) else id_or_info.id) for path, id_or_info in iterator]

    tried(what, found)


# More than one answer of a search, or of the ioctl for users, has room for.
os.mkdir("many")
for nr in range(300):
    btrfsutil.create_subvolume(f"many/{nr}")
# A path of 6 KiB.
for depth in range(30):
    btrfsutil.create_subvolume(str(depth) * 100)
    os.chdir(str(depth) * 100)
tried("deepest", lambda: btrfsutil.subvolume_id("."))
tried("deepest", lambda: len(btrfsutil.subvolume_path(".")))
os.fchdir(top)
for post_order in [False, True]:
    listed("root", ".", post_order=post_order)
    listed("below the first", "0" * 100, post_order=post_order)
child = os.fork()
if child == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    for post_order in [False, True]:
        listed("user", "many/..", post_order=post_order)
        listed("user below the first", "0" * 100, post_order=post_order)
    sys.stdout.flush()
    os._exit(0)
sys.stdout.flush()
os.waitpid(child, 0)
tried("delete", lambda: btrfsutil.delete_subvolume("0" * 100, recursive=True))
for nr in range(300):
    btrfsutil.delete_subvolume(f"many/{nr}")
listed("rest", ".", 5)
