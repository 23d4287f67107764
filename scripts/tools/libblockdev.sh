#!/bin/sh
# libblockdev, which udisks and installers use, makes, lists and changes a filesystem by the names of btrfs-progs.
# Needs root, FUSE, loop devices (Debian: libblockdev-btrfs2 gir1.2-blockdev-2.0 python3-gi kmod).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
python=/usr/bin/python3
cat >"$work/drive.py" <<'EOF'
import subprocess, sys
import gi
version = None
for version in ("3.0", "2.0"):
    try:
        gi.require_version("BlockDev", version)
        break
    except ValueError:
        continue
else:
    sys.exit(77)
from gi.repository import BlockDev
plugin = BlockDev.PluginSpec()
plugin.name = BlockDev.Plugin.BTRFS
try:
    BlockDev.ensure_init([plugin], None)
except Exception:
    # The plugin wants to find the kernel's module btrfs below /lib/modules.
    sys.exit(77)
if len(sys.argv) == 1:
    sys.exit(0)
one, two, top = sys.argv[1:]

def devices(path):
    return [(d.id, d.path, d.size) for d in BlockDev.btrfs_list_devices(path)]
def subvolumes(path, only_snapshots):
    return [(s.id, s.parent_id, s.path) for s in BlockDev.btrfs_list_subvolumes(path, only_snapshots)]
def check(wanted, got):
    if wanted != got:
        sys.exit("wanted %r, got %r" % (wanted, got))

BlockDev.btrfs_create_volume([one, two], "lab", "raid1", "raid1", None)
check([(1, one, 500 << 20), (2, two, 500 << 20)], devices(one))
info = BlockDev.btrfs_filesystem_info(one)
check(("lab", 2), (info.label, info.num_devices))
uuid = subprocess.check_output(["blkid", "-p", "-o", "value", "-s", "UUID", one], text=True).strip()
check(uuid, info.uuid)
subprocess.check_call(["ubtrfs", "mount", one, top])
check([(1, one, 500 << 20), (2, two, 500 << 20)], devices(top))
BlockDev.btrfs_create_subvolume(top, "sub", None)
BlockDev.btrfs_create_subvolume(top + "/sub", "inner", None)
BlockDev.btrfs_create_snapshot(top + "/sub", top + "/snap", True, None)
check([(256, 5, "sub"), (257, 256, "sub/inner"), (258, 5, "snap")], sorted(subvolumes(top, False)))
check([(258, 5, "snap")], subvolumes(top, True))
check(5, BlockDev.btrfs_get_default_subvolume_id(top))
BlockDev.btrfs_set_default_subvolume(top, 256, None)
check(256, BlockDev.btrfs_get_default_subvolume_id(top))
BlockDev.btrfs_set_default_subvolume(top, 5, None)
BlockDev.btrfs_delete_subvolume(top, "snap", None)
check([], subvolumes(top, True))
try:
    BlockDev.btrfs_remove_device(top, two, None)
    sys.exit("a device of RAID1 was removed")
except gi.repository.GLib.GError:
    pass
BlockDev.btrfs_resize(top, 400 << 20, None)
check([(1, one, 400 << 20), (2, two, 500 << 20)], devices(top))
BlockDev.btrfs_change_label(top, "other")
check("other", BlockDev.btrfs_filesystem_info(top).label)
subprocess.check_call(["ubtrfs", "umount", top])
check(True, BlockDev.btrfs_check(one, None))
EOF
status=0
$python "$work/drive.py" >/dev/null 2>&1 || status=$?
[ $status -ne 77 ] && [ $status -ne 1 ] || skip "libblockdev's plugin for btrfs cannot be loaded"
truncate -s 500M "$work/one.img" "$work/two.img"
one=$(losetup -f --show "$work/one.img")
two=$(losetup -f --show "$work/two.img")
mkdir "$work/top"
$python "$work/drive.py" "$one" "$two" "$work/top" 2>"$work/err" || { cat "$work/err"; fail "libblockdev"; }
losetup -d "$one"
losetup -d "$two"
say "libblockdev: create, list, subvolumes, default, resize, label, check"
