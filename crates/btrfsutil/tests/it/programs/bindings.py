"""Uses the Python module of libbtrfsutil in a directory and prints each result: `bindings.py DIR`. The output must be
equal with each library and on each kind of mount. Numbers that always differ are left out."""

import os
import sys

import btrfsutil

os.chdir(sys.argv[1])
OLD_IDS = 264


def shown(value):
    if isinstance(value, btrfsutil.SubvolumeInfo):
        text = f"{value.id} {value.parent_id} {value.dir_id} {value.flags} {value.stransid} {value.rtransid}"
        if value.id < OLD_IDS:
            text += f" {value.uuid.hex()} {value.parent_uuid.hex()} {value.otransid} {value.otime}"
        return text + f" {value.generation >= value.otransid} {value.ctime > 0}"
    if isinstance(value, btrfsutil.SubvolumeIterator):
        return [shown(found) for found in value]
    if isinstance(value, tuple):
        return tuple(shown(part) for part in value)
    return repr(value)


def call(name, *args, **named):
    try:
        result = shown(getattr(btrfsutil, name)(*args, **named))
    except btrfsutil.BtrfsUtilError as error:
        result = f"BtrfsUtilError {error.btrfsutilerror} {error.errno} {error.strerror} {error.filename} {error.filename2}"
    except (OSError, ValueError, TypeError) as error:
        result = f"{type(error).__name__} {error}"
    shown_args = [arg if isinstance(arg, (str, bytes, int)) else type(arg).__name__ for arg in args]
    print(name, shown_args, sorted(named), result)


inherit = btrfsutil.QgroupInherit()
inherit.add_group(1 << 48)
print(inherit.groups)
root, directory = os.open(".", os.O_RDONLY), os.open("dir", os.O_RDONLY)
for at in [".", "a", b"a/d", "a/x", "dir", "missing", "/proc", root, directory, -1]:
    for name in ["is_subvolume", "subvolume_id", "subvolume_path", "subvolume_info", "get_subvolume_read_only"]:
        call(name, at)
    call("get_default_subvolume", at)
    call("deleted_subvolumes", at)
    call("SubvolumeIterator", at)
    call("SubvolumeIterator", at, 5, post_order=True)
    call("SubvolumeIterator", at, info=True)
    call("subvolume_path", at, 258)
    call("subvolume_info", at, 259)
    call("subvolume_info", at, 9999)
    call("sync", at)
    call("wait_sync", at)
with btrfsutil.SubvolumeIterator("a", 5) as iterator:
    print(iterator.fileno() >= 0, next(iterator))
print(btrfsutil.start_sync(".") > 0)
for read_only in [True, False]:
    call("set_subvolume_read_only", "a", read_only)
    call("get_subvolume_read_only", "a")
call("set_default_subvolume", "a")
call("get_default_subvolume", "a/x")
call("set_default_subvolume", root, 5)
for path in ["new", "new/in", "new", "missing/x", "/proc/x"]:
    call("create_subvolume", path)
call("create_subvolume", "joined", qgroup_inherit=inherit)
call("create_subvolume_fd" if hasattr(btrfsutil, "create_subvolume_fd") else "create_subvolume", "other")
call("create_snapshot", "a", "s1")
call("create_snapshot", "a", "s2", read_only=True)
call("create_snapshot", "a", "s3", recursive=True)
call("create_snapshot", "a", "s4", recursive=True, read_only=True)
call("create_snapshot", root, "s5", qgroup_inherit=inherit)
call("create_snapshot", "dir", "s6")
call("SubvolumeIterator", ".", info=True)
call("delete_subvolume", "s3")
call("delete_subvolume", "s3", recursive=True)
call("delete_subvolume", "s2")
call("delete_subvolume", "missing")
call("delete_subvolume", "dir")
call("SubvolumeIterator", ".", post_order=True)
