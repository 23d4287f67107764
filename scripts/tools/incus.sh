#!/bin/sh
# The command lines of btrfs that Incus runs, with its rules for reading their output.
# They are those of Incus 7's storage driver for btrfs (Apache-2.0). Incus itself is not needed.
# Needs root and FUSE (Debian: attr acl).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse

# Incus wants "WORD vVERSION", newer than 5.14.2.
btrfs version | awk 'NR == 1 && $2 ~ /^v[0-9.]+$/ { sub(/^v/, "", $2); split($2, v, "."); ok = v[1] > 5 } END { exit !ok }' || fail "btrfs version"

# The pool is a sparse file with a label.
truncate -s 1G "$work/pool.img"
mkfs.btrfs -L pool "$work/pool.img" >/dev/null
mkdir "$work/pool"
ubtrfs mount -o user_subvol_rm_allowed "$work/pool.img" "$work/pool"
pool=$work/pool
mkdir "$pool/containers" "$pool/containers-snapshots" "$pool/custom" "$pool/images"
chmod 711 "$pool/containers" "$pool/images"

# An image, and a container as a snapshot of the image. Lists have 9 columns.
btrfs subvolume create "$pool/images/base" >/dev/null
make_tree "$pool/images/base"
btrfs property set -f -ts "$pool/images/base" ro true
expect "ro=true" "$(btrfs property get -ts "$pool/images/base" ro)" "property ro of an image"
btrfs subvolume snapshot "$pool/images/base" "$pool/containers/c1" >/dev/null
expect "ro=false" "$(btrfs property get -ts "$pool/containers/c1" ro)" "property ro of a container"
same_trees "$pool/images/base" "$pool/containers/c1"
btrfs subvolume create "$pool/containers/c1/docs/nested" >/dev/null
echo inner >"$pool/containers/c1/docs/nested/file"
expect "containers/c1 containers/c1/docs/nested images/base" \
  "$(btrfs subvolume list "$pool" | awk 'NF == 9 { print $9 }' | sort | paste -sd' ')" "list with 9 columns"
[ -n "$(btrfs subvolume list -o "$pool/containers/c1")" ] || fail "list -o of a subvolume with a nested one"
[ -z "$(btrfs subvolume list -o "$pool/images/base")" ] || fail "list -o of a subvolume without a nested one"

# A recursive snapshot: the directory in place of the nested subvolume is removed, then replaced.
mkdir "$pool/containers-snapshots/c1"
snap=$pool/containers-snapshots/c1/snap0
btrfs subvolume snapshot "$pool/containers/c1" "$snap" >/dev/null
rmdir "$snap/docs/nested"
btrfs subvolume snapshot "$pool/containers/c1/docs/nested" "$snap/docs/nested" >/dev/null
expect inner "$(cat "$snap/docs/nested/file")" "file in a nested snapshot"
for path in "$snap/docs/nested" "$snap"; do btrfs property set -f -ts "$path" ro true; done

# Compression of a volume, and volumes without copy on write.
btrfs subvolume create "$pool/custom/vol" >/dev/null
btrfs property set "$pool/custom/vol" compression zstd
expect "compression=zstd" "$(btrfs property get "$pool/custom/vol" compression)" "property compression"
btrfs subvolume create "$pool/custom/block" >/dev/null
chattr -c "$pool/custom/block" 2>/dev/null || true
chattr +C "$pool/custom/block" || fail "chattr +C of a subvolume"
truncate -s 100M "$pool/custom/block/root.img"
lsattr "$pool/custom/block/root.img" | grep -q '^[^ ]*C' || fail "a file inherits +C"

# Quotas: enabled on demand, and waited for. The group is the first column of the first line.
group() { btrfs qgroup show -e -f --raw "$1" | awk 'NF >= 3 && tolower($1) !~ /^(qgroupid|-)/ { print $1, $3; exit }'; }
! btrfs qgroup show -e -f --raw "$pool/custom/vol" >/dev/null 2>&1 || fail "qgroup show without quotas succeeds"
btrfs quota enable "$pool"
btrfs quota rescan -w "$pool" >/dev/null
id=$(btrfs subvolume show "$pool/custom/vol" | sed -n 's/^[[:space:]]*Subvolume ID:[[:space:]]*//p')
expect "0/$id" "$(group "$pool/custom/vol" | cut -d' ' -f1)" "quota group of a volume"
btrfs qgroup limit 20000000 "0/$id" "$pool/custom/vol"
btrfs qgroup limit -e none "0/$id" "$pool/custom/vol"
! head -c 30000000 /dev/urandom >"$pool/custom/vol/much" 2>/dev/null || fail "a write beyond the limit succeeds"
sync -f "$pool/custom/vol" && btrfs filesystem sync "$pool" >/dev/null
used=$(group "$pool/custom/vol" | cut -d' ' -f2)
[ "$used" -gt 10000000 ] && [ "$used" -le 20000000 ] || fail "usage of $used bytes at a limit of 20000000"
btrfs qgroup limit none "0/$id" "$pool/custom/vol"
btrfs qgroup limit -e none "0/$id" "$pool/custom/vol"
head -c 30000000 /dev/urandom >"$pool/custom/vol/much" || fail "a write after the limit was removed"

# Migration: send the snapshot and then the change, and receive without a name, to the end of one stream.
make_mount other 1G
mkdir -p "$work/other/containers/recv" "$work/other/containers-snapshots/c1"
btrfs send "$snap" 2>/dev/null | btrfs receive -e "$work/other/containers/recv" 2>/dev/null || fail "send and receive -e of a snapshot"
expect snap0 "$(ls "$work/other/containers/recv")" "name of the received subvolume"
btrfs property set -f -ts "$work/other/containers/recv/snap0" ro false
mv "$work/other/containers/recv/snap0" "$work/other/containers-snapshots/c1/snap0"
btrfs property set -f -ts "$work/other/containers-snapshots/c1/snap0" ro true
# Lists with the received UUID have 11 columns, with the UUID too 13.
btrfs subvolume list -R "$work/other" | awk 'NF != 11 { bad = 1 } END { exit bad || NR != 1 }' || fail "list -R with 11 columns"
btrfs subvolume list -u -R "$pool" | awk 'NF != 13 || length($11) != 36 { bad = 1 } END { exit bad || NR != 7 }' || fail "list -u -R with 13 columns"
same_trees "$snap/bin" "$work/other/containers-snapshots/c1/snap0/bin"
# Making it writable removed its received UUID, so a change needs a fresh copy.
btrfs subvolume delete "$work/other/containers-snapshots/c1/snap0" >/dev/null
btrfs send "$snap" 2>/dev/null | btrfs receive -e "$work/other/containers-snapshots/c1" 2>/dev/null
seq 1000 >"$pool/containers/c1/new"
rm "$pool/containers/c1/docs/1.txt"
btrfs subvolume snapshot -r "$pool/containers/c1" "$pool/containers-snapshots/c1/snap1" >/dev/null
btrfs send -p "$snap" "$pool/containers-snapshots/c1/snap1" 2>/dev/null | btrfs receive "$work/other/containers-snapshots/c1" 2>/dev/null || fail "incremental migration"
for part in bin new empty; do cp -a "$pool/containers-snapshots/c1/snap1/$part" "$work/a.$part"; done
cmp "$pool/containers-snapshots/c1/snap1/new" "$work/other/containers-snapshots/c1/snap1/new" || fail "a migrated file"
[ ! -e "$work/other/containers-snapshots/c1/snap1/docs/1.txt" ] || fail "a removed file was migrated"
expect "snap0 snap1" "$(btrfs subvolume list "$work/other" | awk 'NF == 9 && index($9, "containers-snapshots/c1/") == 1 { sub(/.*\//, "", $9); print $9 }' | paste -sd' ')" "snapshots in the order of their ids"

# A backup into a file.
btrfs send -p "$snap" "$pool/containers-snapshots/c1/snap1" >"$work/backup.bin" 2>/dev/null
[ -s "$work/backup.bin" ] || fail "send into a file"

# Deleting: a subvolume with a nested one cannot be deleted, so Incus deletes the nested one first.
remove() {
  btrfs property set -f -ts "$1" ro false
  btrfs qgroup destroy "$(group "$1" | cut -d' ' -f1)" "$1" 2>/dev/null || true
  chmod 700 "$1"
  btrfs subvolume delete "$1" >/dev/null 2>&1
}
! remove "$snap" || fail "a subvolume with a nested one was deleted"
remove "$snap/docs/nested" || fail "delete of a nested subvolume"
remove "$snap" || fail "delete of a subvolume"
[ ! -e "$snap" ] || fail "a deleted subvolume is still there"

# The backing device, and growing and shrinking of the pool.
btrfs filesystem show "$work/pool" | awk '$1 == "devid" { print $NF }' | grep -qx "$work/pool.img" || fail "device in filesystem show"
btrfs filesystem resize "$((900 * 1024))K" "$work/pool" >/dev/null || fail "filesystem resize in K"
btrfs filesystem resize max "$work/pool" >/dev/null || fail "filesystem resize max"
say "pool, volumes, snapshots, quotas, migration, deletion and resizing answer as Incus expects"

ubtrfs umount "$work/pool"
ubtrfs umount "$work/other"
# A copied pool gets another UUID.
cp --sparse=always "$work/pool.img" "$work/copy.img"
btrfstune -f -u "$work/copy.img" >/dev/null || fail "btrfstune -f -u"
[ "$(blkid -p -o value -s UUID "$work/pool.img")" != "$(blkid -p -o value -s UUID "$work/copy.img")" ] || fail "the UUID is still the same"
for name in pool other copy; do check_image "$work/$name.img"; done
