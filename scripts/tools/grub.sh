#!/bin/sh
# grub-probe and grub-mkrelpath find the device, the UUID and the path in the filesystem, as on Linux's btrfs.
# Needs root, FUSE, loop devices and GRUB's tools (Debian: grub-common).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need grub-probe grub-mkrelpath
uuid=6f4b7a0e-4f0f-4a0e-8a50-2f4a9be3f7ab
mkfs.btrfs -q -b 400M -L grub -U $uuid "$work/disk.img"
btrfs subvolume create "$work/disk.img:/@" >/dev/null
btrfs subvolume create "$work/disk.img:/@/inner" >/dev/null
loop=$(losetup -f --show "$work/disk.img")
dir=$work/dir
mkdir "$dir"
views() { # PREFIX
  set -- "${1:-}"
  mkdir -p "$dir$1/boot/grub" "$dir$1/inner/boot"
  touch "$dir$1/boot/grub/kernel" "$dir$1/inner/boot/kernel"
  for what in fs device fs_uuid fs_label; do grub-probe -t $what "$dir$1/boot/grub"; done
  grub-mkrelpath "$dir$1/boot/grub/kernel"
  grub-mkrelpath "$dir$1/inner/boot/kernel"
}
wanted="btrfs $loop $uuid grub /@/boot/grub/kernel /@/inner/boot/kernel"
for options in subvol=@ subvol=@,fuseblk subvol=/; do
  prefix=
  [ $options != subvol=/ ] || prefix=/@
  ubtrfs mount -o $options "$loop" "$dir"
  expect "$wanted" "$(views $prefix | paste -sd' ')" "GRUB's view of a mount with $options"
  ubtrfs umount "$dir"
done
if linux_btrfs; then
  mount -i -t btrfs -o subvol=@ "$loop" "$dir"
  expect "$wanted" "$(views "" | paste -sd' ')" "GRUB's view of Linux's mount"
  umount "$dir"
fi
expect "btrfs $uuid grub" "$(for what in fs fs_uuid fs_label; do grub-probe -t $what -d "$loop"; done | paste -sd' ')" "GRUB's view of the device"
losetup -d "$loop"
say "grub-probe and grub-mkrelpath"
