"""Calls the shared library with null pointers, by the newer names of its functions, and on an image that is in use:
`interface.py LIBRARY DIR IMAGE_IN_USE`. Only ours is called so; the original crashes for null pointers."""

import ctypes
import os
import sys

library, directory, image = sys.argv[1:]
util = ctypes.CDLL(library, use_errno=True)
NEW_NAMES = """
    fs_start_sync fs_start_sync_fd fs_sync fs_sync_fd fs_wait_sync fs_wait_sync_fd qgroup_inherit_create
    qgroup_inherit_destroy subvolume_create subvolume_create_fd subvolume_delete subvolume_delete_by_id_fd
    subvolume_delete_fd subvolume_get_default subvolume_get_default_fd subvolume_get_id subvolume_get_id_fd
    subvolume_get_info subvolume_get_info_fd subvolume_get_path subvolume_get_path_fd subvolume_get_read_only
    subvolume_get_read_only_fd subvolume_is_valid subvolume_is_valid_fd subvolume_iter_create subvolume_iter_create_fd
    subvolume_iter_destroy subvolume_iter_next subvolume_iter_next_info subvolume_iterator_get_fd
    subvolume_list_deleted subvolume_list_deleted_fd subvolume_set_default subvolume_set_default_fd
    subvolume_set_read_only subvolume_set_read_only_fd subvolume_snapshot subvolume_snapshot_fd subvolume_snapshot_fd2
""".split()


def call(name, *args):
    ctypes.set_errno(0)
    result = getattr(util, "btrfs_util_" + name)(*args)
    return result, ctypes.get_errno()


for name in NEW_NAMES:
    getattr(util, "btrfs_util_" + name)
INVALID = (3, 22)
null = ctypes.c_void_p(None)
zero = ctypes.c_uint64(0)
fd = os.open(directory, os.O_RDONLY)
path = directory.encode()
# A null pointer in place of the path, and of the result.
for name, after in [
    ("sync", []), ("start_sync", [null]), ("wait_sync", [zero]), ("is_subvolume", []), ("subvolume_id", [null]),
    ("subvolume_path", [zero, null]), ("subvolume_info", [zero, null]), ("get_subvolume_read_only", [null]),
    ("set_subvolume_read_only", [ctypes.c_bool(False)]), ("get_default_subvolume", [null]),
    ("set_default_subvolume", [zero]), ("create_subvolume", [0, null, null]), ("delete_subvolume", [0]),
    ("create_snapshot", [null, 0, null, null]), ("create_subvolume_iterator", [zero, 0, null]),
    ("deleted_subvolumes", [null, null]),
]:
    assert call(name, null, *after) == INVALID, name
for name, args in [
    ("subvolume_id", [path, null]), ("subvolume_id_fd", [fd, null]), ("subvolume_path_fd", [fd, zero, null]),
    ("get_subvolume_read_only_fd", [fd, null]), ("get_default_subvolume_fd", [fd, null]),
    ("create_subvolume_fd", [fd, null, 0, null, null]), ("delete_subvolume_fd", [fd, null, 0]),
    ("create_snapshot", [path, null, 0, null, null]), ("create_snapshot_fd2", [fd, fd, null, 0, null, null]),
    ("create_subvolume_iterator_fd", [fd, zero, 0, null]), ("deleted_subvolumes_fd", [fd, null, null]),
    ("create_qgroup_inherit", [0, null]), ("qgroup_inherit_add_group", [null, zero]),
    ("subvolume_iterator_next", [null, null, null]), ("subvolume_iterator_next_info", [null, null, null]),
]:
    assert call(name, *args) == INVALID, (name, call(name, *args))
assert util.btrfs_util_subvolume_iterator_fd(null) == -1
util.btrfs_util_destroy_subvolume_iterator(null)
util.btrfs_util_destroy_qgroup_inherit(null)
util.btrfs_util_qgroup_inherit_get_groups(null, null, null)

# The newer names.
number, flag, address = ctypes.c_uint64(77), ctypes.c_bool(True), ctypes.c_void_p()
for name, args in [
    ("fs_sync", [path]), ("fs_sync_fd", [fd]), ("fs_start_sync", [path, ctypes.byref(number)]),
    ("fs_wait_sync", [path, zero]), ("subvolume_is_valid", [path]), ("subvolume_is_valid_fd", [fd]),
    ("subvolume_get_id", [path, ctypes.byref(number)]), ("subvolume_get_read_only", [path, ctypes.byref(flag)]),
    ("subvolume_get_info", [path, zero, null]), ("subvolume_get_default", [path, ctypes.byref(number)]),
    ("subvolume_create", [path + b"/new", 0, null, null]), ("subvolume_create_fd", [fd, b"other", 0, null, null]),
    ("subvolume_snapshot", [path + b"/new", path + b"/snapshot", 2, null, null]),
    ("subvolume_set_read_only", [path + b"/new", ctypes.c_bool(True)]),
    ("subvolume_iter_create_fd", [fd, zero, 0, ctypes.byref(address)]),
    ("subvolume_iter_next", [address, null, ctypes.byref(number)]), ("subvolume_delete", [path + b"/other", 0]),
    ("subvolume_delete_fd", [fd, b"new", 1]),
]:
    assert call(name, *args) == (0, 0), (name, call(name, *args))
assert util.btrfs_util_subvolume_iterator_get_fd(address) == fd
util.btrfs_util_subvolume_iter_destroy(address)
print(sorted(os.listdir(directory)))

# An image in use, and one that does not exist: OPEN_FAILED, with EBUSY and ENOENT.
assert call("create_subvolume", image.encode() + b":/x", 0, null, null) == (7, 16)
assert call("subvolume_id", image.encode() + b"-missing:/", ctypes.byref(number)) == (7, 2)
assert call("subvolume_id", b"/dev/null:/", ctypes.byref(number)) == (7, 2)
print("done")
