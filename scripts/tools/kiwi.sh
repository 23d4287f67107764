#!/bin/sh
# kiwi's own classes make a filesystem with subvolumes on a loop device, fill it and mount it again.
# Needs root, FUSE, loop devices and kiwi (Debian: kiwi rsync qemu-utils).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need unshare rsync qemu-img blkid
python=/usr/bin/python3
$python -c 'import kiwi.volume_manager.btrfs' 2>/dev/null || skip "kiwi's Python modules are missing"
in_namespace -m "$@"
# kiwi calls "mount DEVICE DIR". mount(8) finds the type btrfs on the device, and then the helper mount.btrfs.
mkdir "$work/sbin" "$work/root"
for name in mount.btrfs mount.ubtrfs; do ln -s "$programs/ubtrfs" "$work/sbin/$name"; done
sbin=$(readlink -f /sbin)
mount -t overlay overlay -o "lowerdir=$work/sbin:$sbin" "$sbin" 2>/dev/null || skip "overlay mounts are not possible here"
at_end() { umount "$sbin"; }

make_tree "$work/root"
mkdir -p "$work/root/home" "$work/root/var/log" "$work/root/boot" "$work/root/etc"
echo log >"$work/root/var/log/messages"
cat >"$work/drive.py" <<'EOF'
import os, subprocess, sys
from collections import namedtuple
from kiwi.storage.loop_device import LoopDevice
from kiwi.volume_manager.btrfs import VolumeManagerBtrfs

work, snapshots = sys.argv[1], sys.argv[2] == "snapshots"
Volume = namedtuple("Volume", "name size realpath mountpoint fullsize label attributes is_root_volume")
def volume(path, root=False, attributes=()):
    return Volume(path, None, path, None, False, None, list(attributes), root)
volumes = [volume("/", True), volume("home"), volume("var/log", attributes=["no-copy-on-write"]), volume("boot")]
image = os.path.join(work, sys.argv[2] + ".img")
loop = LoopDevice(image, 600)
loop.create()
manager = VolumeManagerBtrfs({"root": loop}, os.path.join(work, "root") + "/", volumes, {
    "root_label": "ROOT", "root_is_snapshot": snapshots, "root_is_readonly_snapshot": snapshots, "quota_groups": True,
    "fs_create_options": [], "fs_mount_options": ["compress=zstd"],
})
manager.setup()
print("type", subprocess.check_output(["findmnt", "-n", "-o", "FSTYPE", manager.mountpoint], text=True).strip())
manager.create_volumes("btrfs")
manager.mount_volumes()
manager.sync_data()
for line in manager.get_fstab("by-label", "btrfs"):
    print("fstab", line)
assert manager.umount_volumes() in (True, None)
manager.mount_volumes()
# The root is the default subvolume now.
print("root", " ".join(sorted(os.listdir(manager.mountpoint))))
manager.set_property_readonly_root()
if snapshots:
    try:
        open(os.path.join(manager.mountpoint, "etc/x"), "w")
        print("writable")
    except OSError as error:
        print("readonly", error.errno)
assert manager.umount_volumes() in (True, None)
before = subprocess.check_output(["blkid", "-p", "-s", "UUID", "-o", "value", loop.get_device()])
subprocess.check_call(["btrfstune", "-f", "-u", loop.get_device()], stdout=subprocess.DEVNULL)
after = subprocess.check_output(["blkid", "-p", "-s", "UUID", "-o", "value", loop.get_device()])
print("uuid", "changed" if before != after else "same")
EOF
for layout in plain snapshots; do
  $python "$work/drive.py" "$work" $layout >"$work/out" 2>"$work/err" || { cat "$work/out"; tail -n 15 "$work/err"; fail "kiwi with the layout $layout"; }
  grep -qx 'type fuse.ubtrfs' "$work/out" || { cat "$work/out"; fail "kiwi's mount was not by ubtrfs"; }
  grep -qx 'uuid changed' "$work/out" || { cat "$work/out"; fail "btrfstune -f -u"; }
  grep -q '^root .*bin .*docs' "$work/out" || { cat "$work/out"; fail "the default subvolume"; }
  [ $layout = plain ] || grep -qx 'readonly 30' "$work/out" || { cat "$work/out"; fail "the read-only root"; }
  timeout 20 flock -x "$work/$layout.img" true || fail "the image stays locked"
  ! losetup -j "$work/$layout.img" | grep -q . || losetup -d "$(losetup -n -O NAME -j "$work/$layout.img")"
  (cd "$work/root" && find . -type f ! -path './var/log/*' ! -path './.snapshots/*' -exec sha256sum {} +) | sort >"$work/left"
  rm -rf "$work/copy"
  mkdir "$work/copy"
  ubtrfs export "$work/$layout.img:/" | tar -C "$work/copy" -x
  (cd "$work/copy" && find . -type f ! -path './var/log/*' ! -path './.snapshots/*' -exec sha256sum {} +) | sort >"$work/right"
  same "$work/left" "$work/right" "the root tree and the image with the layout $layout"
  check_image "$work/$layout.img"
  say "kiwi, layout $layout: setup, volumes, data, mounts, UUID"
done
