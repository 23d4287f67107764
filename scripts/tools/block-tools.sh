#!/bin/sh
# findmnt, lsblk, blkid, wipefs, df, mountpoint and stat tell the truth about images, devices and mounts.
# Needs root, FUSE and loop devices (Debian: util-linux, jq for JSON).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need blkid lsblk findmnt wipefs df mountpoint

uuid=8a3b6c1e-37ab-4b53-9a60-5ddc5f0f8a11
mkfs.btrfs -q -b 300M -L "my label" -U $uuid "$work/disk.img" >/dev/null
blkid -p -o export "$work/disk.img" >"$work/out" || fail "blkid -p of an image"
for line in LABEL=my\\\\\ label UUID=$uuid TYPE=btrfs USAGE=filesystem BLOCK_SIZE=4096; do
  grep -q "^$line\$" "$work/out" || { cat "$work/out"; fail "blkid -p does not print $line"; }
done
grep -q '^UUID_SUB=' "$work/out" || fail "blkid -p prints no UUID_SUB"
loop=$(losetup -f --show "$work/disk.img")
expect "$uuid" "$(blkid -c /dev/null -o value -s UUID "$loop")" "blkid of a device"
expect "$loop" "$(blkid -c /dev/null -l -o device -t UUID=$uuid)" "blkid -t UUID="
expect "$loop" "$(findfs UUID=$uuid)" "findfs UUID="
expect "btrfs" "$(wipefs -n -O TYPE "$loop" | tail -n 1)" "wipefs"
# lsblk asks udev for these columns.
[ ! -e /run/udev/control ] || expect "btrfs my label $uuid" "$(lsblk -n -d -o FSTYPE,LABEL,UUID "$loop" | sed 's/  */ /g')" "lsblk -o FSTYPE,LABEL,UUID"
if has_real; then
  # libblkid sees the same in images of Linux's mkfs.
  truncate -s 300M "$work/other.img"
  real mkfs.btrfs -q -L "my label" "$work/other.img" >/dev/null 2>&1
  blkid -p -o export "$work/other.img" | sed 's/^UUID.*=.*//; s/^DEVNAME=.*//' | sort >"$work/left"
  sed 's/^UUID.*=.*//; s/^DEVNAME=.*//' "$work/out" | sort >"$work/right"
  same "$work/left" "$work/right" "blkid -p of images by Linux and by ubtrfs"
  rm "$work/other.img"
fi
say "blkid, findfs, wipefs and lsblk know the image"

mkdir "$work/dir" "$work/sub"
ubtrfs mount "$loop" "$work/dir"
btrfs subvolume create "$work/dir/@home" >/dev/null
ubtrfs mount -o subvol=@home,noexec "$loop" "$work/sub"
expect "fuse.ubtrfs $loop" "$(findmnt -n -o FSTYPE,SOURCE "$work/dir" | tr -s ' ' | sed 's/\[.*//')" "findmnt of a mount"
expect "/@home" "$(findmnt -n -o FSROOT "$work/sub")" "findmnt -o FSROOT of a subvolume"
findmnt -n -o OPTIONS "$work/sub" | grep -q noexec || fail "findmnt shows no noexec"
expect "$work/dir $work/sub" "$(findmnt -n -r -S "$loop" -o TARGET | sort | paste -sd' ')" "findmnt -S DEVICE"
findmnt -J "$work/dir" >/dev/null || fail "findmnt -J"
expect "$work/dir $work/sub" "$(lsblk -n -o MOUNTPOINTS "$loop" | sed 's/^ *//; s/ *$//' | grep . | sort | paste -sd' ')" "lsblk shows the mount points of the device"
mountpoint -q "$work/dir" || fail "mountpoint"
expect "$loop fuse.ubtrfs" "$(df --output=source,fstype "$work/dir" | tail -n 1 | tr -s ' ')" "df"
expect 256 "$(stat -c %i "$work/dir")" "inode number of the root directory"
say "findmnt, lsblk, df and mountpoint know the mounts"

# wipefs and mkfs refuse a device in use.
! wipefs -a "$loop" 2>/dev/null || fail "wipefs -a wiped a mounted device"
! mkfs.ext4 -q "$loop" </dev/null >/dev/null 2>&1 || fail "mkfs.ext4 wrote to a mounted device"
! mkfs.btrfs -q -f "$loop" 2>/dev/null || fail "mkfs.btrfs wrote to a mounted device"
ubtrfs umount "$work/sub"
fstrim -v "$work/dir" >"$work/out" 2>&1 || { cat "$work/out"; fail "fstrim"; }
ubtrfs umount "$work/dir"
wipefs -q -a "$loop" || fail "wipefs -a after the unmount"
losetup -d "$loop"
[ -z "$(blkid -p -o value -s TYPE "$work/disk.img")" ] || fail "blkid finds a wiped filesystem"
say "devices in use are protected, fstrim works"
