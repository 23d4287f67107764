#!/bin/sh
# systemd-repart makes a disk image with a partition of btrfs, by the name mkfs.btrfs.
# Needs root, loop devices and systemd-repart (Debian: systemd, from version 13 on systemd-repart).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need systemd-repart partx blkid flock
need_loop

# The command line of newer versions: options follow the device, and the root directory is copied in.
mkdir -p "$work/root/etc"
make_tree "$work/root"
uuid=5d3a9c0e-8f57-4d4e-9c9b-0c0dd0a1f3a7
truncate -s 256M "$work/copied.img"
mkfs.btrfs -q -L system -U $uuid "$work/copied.img" --nodiscard -r "$work/root" || fail "mkfs.btrfs -q -L -U FILE --nodiscard -r ROOT"
expect "$uuid system" "$(blkid -p -o value -s UUID "$work/copied.img") $(blkid -p -o value -s LABEL "$work/copied.img")" "UUID and label by blkid"
check_image "$work/copied.img"
if linux_btrfs; then
  linux_mount "$work/copied.img" "$work/linux"
  same_trees "$work/root" "$work/linux"
  umount "$work/linux"
fi
say "a copied root directory: the tree is the same"

# systemd's programs hold a BSD lock on a block device while a child formats it: https://systemd.io/BLOCK_DEVICE_LOCKING
truncate -s 256M "$work/locked.img"
loop=$(losetup -f --show "$work/locked.img")
status=0
flock -x "$loop" mkfs.btrfs -q -L locked -U $uuid "$loop" 2>"$work/err" || status=$?
losetup -d "$loop"
[ $status -eq 0 ] || { cat "$work/err"; note "mkfs.btrfs of a device that the caller has locked with flock"; }
[ $status -ne 0 ] || say "mkfs.btrfs under the caller's BSD lock"

mkdir "$work/definitions"
cat >"$work/definitions/10-root.conf" <<EOF
[Partition]
Type=root
Format=btrfs
Label=system
SizeMinBytes=256M
SizeMaxBytes=256M
EOF
# With a kernel that has btrfs, systemd-repart also copies files in.
! linux_btrfs || printf 'CopyFiles=%s:/\nMakeDirectories=/home /var/log\n' "$work/root" >>"$work/definitions/10-root.conf"
systemd-repart --definitions="$work/definitions" --empty=create --size=auto --dry-run=no --no-pager \
  --seed=1b32ab3d-2bb2-4a1b-9e94-8a2a8b7c6d5e "$work/disk.raw" >"$work/out" 2>&1 || { cat "$work/out"; fail "systemd-repart"; }
start=$(partx -g -o START "$work/disk.raw" | tr -d " ")
expect "btrfs system" "$(blkid -p -O $((start * 512)) -o value -s TYPE "$work/disk.raw") $(blkid -p -O $((start * 512)) -o value -s LABEL "$work/disk.raw")" "type and label of the partition"
dd if="$work/disk.raw" of="$work/part.img" bs=512 skip="$start" count=$((256 * 2048)) conv=sparse 2>/dev/null
check_image "$work/part.img"
if linux_btrfs; then
  linux_mount "$work/part.img" "$work/linux"
  [ -d "$work/linux/var/log" ] && [ -d "$work/linux/home" ] || fail "directories that systemd-repart makes"
  cmp "$work/root/bin/big" "$work/linux/bin/big" || fail "a file that systemd-repart copied"
  umount "$work/linux"
fi
say "systemd-repart made a partition of btrfs"
