#!/bin/sh
# snapper without D-Bus: configuration, snapshots, comparison, undo, quotas, cleanup.
# Needs root, FUSE and snapper (Debian: snapper), and mounts with -o submounts:
# snapper opens a subvolume only if the inode number of its root directory is 256.
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need snapper unshare
in_namespace -m "$@"

# snapper keeps its configuration below /etc. In this namespace, it finds an empty one.
mkdir -p "$work/etc/configs"
defaults=
for file in /etc/default/snapper /etc/sysconfig/snapper /etc/conf.d/snapper; do [ ! -e $file ] || defaults=$file; done
[ -n "$defaults" ] || skip "snapper's list of configurations was not found"
sed 's/^SNAPPER_CONFIGS=.*/SNAPPER_CONFIGS=""/' $defaults >"$work/etc/list"
mount --bind "$work/etc/configs" /etc/snapper/configs
mount --bind "$work/etc/list" $defaults
at_end() { umount /etc/snapper/configs $defaults; }
# Without translation, a name of the error is in the output.
run() { snapper --no-dbus -c box "$@"; }

mkfs.btrfs -q -b 400M "$work/box.img"
mkdir "$work/box"
box=$work/box
ubtrfs mount -o submounts "$work/box.img" "$box"
make_tree "$box"
# snapper's two ways of comparing differ in the second name of a changed file.
rm "$box/docs/deep/hard"
run create-config --fstype btrfs "$box" || fail "create-config"
btrfs subvolume show "$box/.snapshots" >/dev/null || fail "create-config made no subvolume"
say "create-config made the subvolume .snapshots"

expect 256 "$(stat -c %i "$box/.snapshots")" "inode number of a subvolume"
expect 1 "$(run create -d first -p)" "number of the first snapshot"
contents() { (cd "$box" && find . -path ./.snapshots -prune -o -type f -exec sha256sum {} + | sort); }
contents >"$work/first"
echo changed >"$box/docs/1.txt"
rm "$box/docs/2.txt"
echo new >"$box/added"
expect 2 "$(run create -d second -p)" "number of the second snapshot"
expect 3 "$(run create --read-write -d writable -p)" "number of the writable snapshot"
touch "$box/.snapshots/3/snapshot/x" || fail "a writable snapshot is read-only"
! touch "$box/.snapshots/1/snapshot/x" 2>/dev/null || fail "a snapshot is writable"
run status 1..2 | awk '{ print $1, $2 }' | sed "s|$box/||" | sort >"$work/out"
expect "+..... added -..... docs/2.txt c..... docs/1.txt" "$(sort "$work/out" | paste -sd' ')" "status of two snapshots"
run diff 1..2 | grep -q '^+changed' || fail "diff of two snapshots"
run undochange 1..2 >/dev/null || fail "undochange"
contents >"$work/undone"
same "$work/first" "$work/undone" "the contents and the contents after undochange"
say "snapshots, status, diff and undochange"

run setup-quota || fail "setup-quota"
expect 1/0 "$(run get-config | awk -F'[|│]' '/QGROUP/ { gsub(/ /, "", $2); print $2 }')" "quota group of the configuration"
run create --command "head -c 3000000 /dev/urandom >$box/more" -d pair || fail "create --command"
expect "pre post" "$(run --csvout list --columns type | grep -x "pre\|post" | paste -sd' ')" "pair of snapshots"
run set-config NUMBER_MIN_AGE=0 NUMBER_LIMIT=1 NUMBER_LIMIT_IMPORTANT=1
for i in 1 2 3; do run create -c number -d "numbered $i"; done
run cleanup number || fail "cleanup"
expect 1 "$(run --csvout list --columns cleanup | grep -cx number)" "snapshots after the cleanup"
run delete --sync 3 || fail "delete"
[ ! -e "$box/.snapshots/3" ] || fail "a deleted snapshot is still there"
run delete-config || fail "delete-config"
[ ! -e "$box/.snapshots" ] || fail "delete-config left .snapshots"
expect "" "$(btrfs subvolume list "$box")" "subvolumes after delete-config"
say "quotas, pairs, cleanup and delete-config"
ubtrfs umount "$box"
check_image "$work/box.img"
