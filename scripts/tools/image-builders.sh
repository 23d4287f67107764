#!/bin/sh
# The command lines of kiwi and osbuild: make a filesystem on a device, subvolumes, quotas, a default, and mount it all.
# The programs themselves are not needed. They run these commands.
# Needs root, FUSE and loop devices (Debian: attr acl).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need blkid unshare

# Both call "mount -t btrfs". In a private namespace, mount(8) then finds the helper mount.btrfs of ubtrfs.
in_namespace -m "$@"
mkdir "$work/sbin"
ln -s "$programs/ubtrfs" "$work/sbin/mount.btrfs"
ln -s "$programs/ubtrfs" "$work/sbin/mount.ubtrfs"
mount -t overlay overlay -o "lowerdir=$work/sbin:$(readlink -f /sbin)" "$(readlink -f /sbin)" 2>/dev/null || skip "overlay mounts are not possible here"
at_end() { umount "$(readlink -f /sbin)"; }

attach() { losetup -f --show "$1"; }
say "kiwi: a root filesystem with a snapshot layout of snapper, simple quotas and a read-only root"
truncate -s 600M "$work/kiwi.img"
loop=$(attach "$work/kiwi.img")
uuid=1b1f2a10-7c7d-4f93-9e02-a52a1d9e6a55
mkfs.btrfs -L ROOT -U $uuid --byte-count $((512 * 1024 * 1024)) "$loop" >/dev/null || fail "mkfs.btrfs -L -U --byte-count"
expect "$uuid ROOT btrfs" "$(blkid "$loop" -s UUID -o value) $(blkid "$loop" -s LABEL -o value) $(blkid "$loop" -s TYPE -o value)" "blkid of the new filesystem"
top=$work/top
mkdir "$top"
mount -t btrfs -o compress=zstd "$loop" "$top" || fail "mount -t btrfs"
expect fuse.ubtrfs "$(findmnt -n -o FSTYPE "$top")" "type of the mount"
btrfs quota enable --simple "$top" || fail "quota enable --simple"
btrfs subvolume create "$top/@" >/dev/null
btrfs subvolume create "$top/@/.snapshots" >/dev/null
chmod 700 "$top/@/.snapshots"
mkdir "$top/@/.snapshots/1"
btrfs subvolume create "$top/@/.snapshots/1/snapshot" >/dev/null
id=$(btrfs subvolume list "$top" | awk '$9 == "@/.snapshots/1/snapshot" { print $2 }')
btrfs subvolume set-default "$id" "$top"
expect "$id" "$(btrfs subvolume get-default "$top" | awk '{ print $2 }')" "get-default"
for name in home opt var; do
  btrfs subvolume create "$top/@/$name" >/dev/null
  mkdir -p "$top/@/.snapshots/1/snapshot/$name"
  mount -t btrfs -o "subvol=@/$name,compress=zstd" "$loop" "$top/@/.snapshots/1/snapshot/$name" || fail "mount of @/$name below the root snapshot"
done
chattr +C "$top/@/var" || fail "chattr +C of a subvolume"
make_tree "$top/@/.snapshots/1/snapshot"
echo data >"$top/@/.snapshots/1/snapshot/var/file"
expect data "$(cat "$top/@/var/file")" "a file written through the mount of @/var"
btrfs qgroup create 1/0 "$top" || fail "qgroup create 1/0"
btrfs qgroup limit 300M 1/0 "$top" || fail "qgroup limit"
btrfs qgroup show -re --raw "$top" >"$work/out" || fail "qgroup show"
awk '$1 == "1/0" && $4 == 314572800 { found = 1 } END { exit !found }' "$work/out" || { cat "$work/out"; fail "limit of 1/0 in qgroup show"; }
for name in home opt var; do umount "$top/@/.snapshots/1/snapshot/$name" || fail "umount of @/$name"; done
umount "$top" || fail "umount"
flock -x "$work/kiwi.img" true
sleep 0.3
# Without subvol=, the default subvolume is mounted.
mount -t btrfs "$loop" "$top" || fail "mount of the default subvolume"
[ -e "$top/bin/big" ] || fail "the mount does not show the default subvolume"
btrfs property set "$top" ro true || fail "property set ro of the mounted default"
! touch "$top/x" 2>/dev/null || fail "a read-only root was written"
btrfs property get "$top" ro | grep -qx ro=true || fail "property get ro"
umount "$top"
btrfstune -f -u "$loop" >/dev/null || fail "btrfstune -f -u"
[ "$(blkid -p "$loop" -s UUID -o value)" != $uuid ] || fail "btrfstune did not change the UUID"
losetup -d "$loop"
ubtrfs check "$work/kiwi.img" >/dev/null || fail "check of kiwi's image"

say "osbuild: mkfs with UUID and label, subvolumes with -p, and mounts of them"
truncate -s 512M "$work/os.img"
loop=$(attach "$work/os.img")
mkfs.btrfs -U $uuid -L root -m single "$loop" >/dev/null || fail "mkfs.btrfs -U -L -m"
mkdir "$work/os"
mount -t btrfs -o compress=zstd:1 "$loop" "$work/os"
btrfs subvolume create -p "$work/os/root" >/dev/null 2>&1 || { note "subvolume create -p"; btrfs subvolume create "$work/os/root" >/dev/null; }
btrfs subvolume create -p "$work/os/a/b/home" >/dev/null 2>&1 ||
  { note "subvolume create -p with missing parents"; mkdir -p "$work/os/a/b"; btrfs subvolume create "$work/os/a/b/home" >/dev/null; }
expect "256 a/b/home 256 root" "$(btrfs subvolume list "$work/os" | awk '{ print ($2 > 255 ? 256 : 0), $9 }' | sort | paste -sd' ')" "list of subvolumes"
umount "$work/os"
sleep 0.3
mount -t btrfs -o subvol=root,compress=zstd:1 "$loop" "$work/os" || fail "mount -o subvol=root"
mkdir "$work/os/home"
mount -t btrfs -o subvol=a/b/home,compress=zstd:1 "$loop" "$work/os/home" || fail "mount -o subvol=a/b/home"
make_tree "$work/os"
make_tree "$work/os/home"
describe "$work/os" >"$work/before"
umount -R "$work/os" || fail "umount -R"
losetup -d "$loop"
timeout 20 flock -x "$work/os.img" true
check_image "$work/os.img"
if linux_btrfs; then
  linux_mount "$work/os.img" "$work/linux" ro,subvol=root
  linux_mount "$work/os.img" "$work/linux/home" ro,subvol=a/b/home
  describe "$work/linux" >"$work/after"
  same "$work/before" "$work/after" "the tree and Linux's view of it"
  umount -R "$work/linux"
fi
