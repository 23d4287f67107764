#!/bin/sh
# At boot, systemd mounts all lines of /etc/fstab at the same time, and at shutdown it unmounts them at the same time.
# Several subvolumes of one device are mounted, used and unmounted in parallel, for some rounds. Mounts of another image
# come and go meanwhile, and get the numbers of those that are gone.
# Needs root, FUSE and loop devices.
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
names="root home var srv opt tmp"
mkfs.btrfs -q -b 512M "$work/disk.img"
for name in $names; do
  btrfs subvolume create "$work/disk.img:/@$name" >/dev/null
  mkdir "$work/$name"
done
loop=$(losetup -f --show "$work/disk.img")
helper=$programs/mount.ubtrfs
[ -x "$helper" ] || { ln -s "$programs/ubtrfs" "$work/mount.ubtrfs"; helper=$work/mount.ubtrfs; }
# Waits for the commands of all names. $1 says what they do.
await_all() {
  what=$1
  set -- $pids
  for name in $names; do
    wait "$1" || { cat "$work/$name.out"; fail "$what of @$name in round $round"; }
    shift
  done
}
mkfs.btrfs -q -b 128M "$work/other.img"
btrfs subvolume create "$work/other.img:/s" >/dev/null
mkdir "$work/other" "$work/inner"
touch "$work/go-on"
while [ -e "$work/go-on" ]; do
  ubtrfs mount "$work/other.img" "$work/other" >/dev/null
  ubtrfs mount -o subvol=s "$work/other.img" "$work/inner" >/dev/null
  ubtrfs umount "$work/inner"
  ubtrfs umount "$work/other"
done >"$work/others.out" 2>&1 &
others=$!
at_end() { rm -f "$work/go-on"; wait $others; }
round=1
while [ $round -le 8 ]; do
  # An image file and a block device take turns.
  source=$loop
  [ $((round % 2)) -eq 0 ] || source=$work/disk.img
  pids=
  for name in $names; do
    "$helper" "$source" "$work/$name" -o "rw,noatime,compress=zstd:3,subvol=@$name" >"$work/$name.out" 2>&1 &
    pids="$pids $!"
  done
  await_all mount
  for name in $names; do
    expect "/@$name" "$(findmnt -n -o FSROOT "$work/$name")" "root of the mount of @$name in round $round"
    echo "$name $round" >"$work/$name/round$round"
  done
  pids=
  for name in $names; do
    case $((round % 4)):$name in 0:* | 1:[rhv]*) command="umount" ;; *) command="ubtrfs umount" ;; esac
    $command "$work/$name" >"$work/$name.out" 2>&1 &
    pids="$pids $!"
  done
  await_all umount
  timeout 20 flock -x "$work/disk.img" true || fail "the image stays locked after round $round"
  round=$((round + 1))
done
rm "$work/go-on"
wait $others
[ ! -s "$work/others.out" ] || { cat "$work/others.out"; fail "mounts of the other image"; }
losetup -d "$loop"
for name in $names; do
  expect 8 "$(ubtrfs ls "$work/disk.img:/@$name" | grep -c round)" "files in @$name"
  expect "$name 8" "$(ubtrfs cat "$work/disk.img:/@$name/round8")" "the last file in @$name"
done
check_image "$work/disk.img"
say "8 rounds of 6 subvolumes, mounted and unmounted in parallel"
