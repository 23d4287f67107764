#!/bin/sh
# Programs which follow https://systemd.io/BLOCK_DEVICE_LOCKING hold a BSD lock on a device while they call others.
# Needs root and loop devices. "udevadm lock" is tested too if udevadm has it (Debian: udev).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need flock losetup blkid
need_loop
truncate -s 256M "$work/disk.img"
loop=$(losetup -f --show "$work/disk.img")
failed=
try() { # WHAT COMMAND...
  what=$1
  shift
  if "$@" >"$work/out" 2>&1; then say "passed under a lock: $what"; else say "FAILED under a lock: $what: $(head -n 1 "$work/out")"; failed=yes; fi
}
try mkfs.btrfs flock -x "$loop" mkfs.btrfs -q -f -L one "$loop"
ubtrfs mkfs -q -f "$loop"
try "mkfs.btrfs with a shared lock" flock -s "$loop" mkfs.btrfs -q -f -L one "$loop"
try "btrfs filesystem label" flock -x "$loop" btrfs filesystem label "$loop" two
try "btrfs filesystem show" flock -x "$loop" btrfs filesystem show "$loop"
try "btrfs check" flock -x "$loop" btrfs check "$loop"
try "btrfs inspect-internal dump-super" flock -x "$loop" btrfs inspect-internal dump-super "$loop"
try btrfstune flock -x "$loop" btrfstune -f -u "$loop"
mkdir "$work/dir"
try mount flock -x "$loop" ubtrfs mount "$loop" "$work/dir"
! mountpoint -q "$work/dir" || ubtrfs umount "$work/dir"
# udevd handles no event of a device while a program holds an exclusive lock on it. Linux's btrfs holds none.
ubtrfs mount "$loop" "$work/dir"
try "udevd's lock of a mounted device" flock -n -s "$loop" true
ubtrfs umount "$work/dir"
if udevadm lock --help >/dev/null 2>&1; then
  # Some versions of udevadm do not return the status of the command.
  udevadm lock --device="$loop" mkfs.btrfs -q -f -L locked "$loop" >/dev/null 2>&1 || true
  try "udevadm lock" test "$(blkid -p -o value -s LABEL "$loop")" = locked
fi
losetup -d "$loop"
[ -z "$failed" ] || fail "commands under a BSD lock of the caller"
