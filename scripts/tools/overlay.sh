#!/bin/sh
# The kernel's overlay filesystem has its upper and lower directories on a mount, and buildah builds an image there.
# Needs root and FUSE. The second part needs buildah and a static shell (Debian: buildah crun busybox-static).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
grep -qw overlay /proc/filesystems || skip "the kernel has no overlay filesystem"

make_mount disk 512M
disk=$work/disk
mkdir "$disk/lower" "$disk/upper" "$disk/work" "$work/merged"
make_tree "$disk/lower"
describe "$disk/lower" >"$work/lower.before"
mount -t overlay overlay -o "lowerdir=$disk/lower,upperdir=$disk/upper,workdir=$disk/work" "$work/merged" || fail "overlay mount with the upper directory on ubtrfs"
! findmnt -n -o OPTIONS "$work/merged" | grep -qw ro || fail "the overlay is read-only"
(cd "$work/merged"
  echo changed >docs/1.txt
  rm docs/2.txt
  rm -r bin
  mkdir bin
  echo other >bin/only
  mv docs/3.txt docs/moved.txt
  mv docs/deep docs/deeper
  ln docs/5.txt docs/five
  chmod 700 docs/6.txt
  setfattr -n user.over -v lay docs/6.txt 2>/dev/null || true
  mknod device c 1 3)
[ ! -e "$work/merged/docs/2.txt" ] && [ "$(ls "$work/merged/bin")" = only ] || fail "removed files are visible"
expect "c 0" "$(stat -c '%F %t' "$disk/upper/docs/2.txt" | sed 's/character special file/c/')" "whiteout of a removed file"
describe "$work/merged" >"$work/merged.before"
umount "$work/merged"
describe "$disk/lower" >"$work/lower.after"
same "$work/lower.before" "$work/lower.after" "the lower tree before and after"
# The overlay is the same after a remount of the filesystem below it.
ubtrfs umount "$disk"
ubtrfs mount "$work/disk.img" "$disk"
mount -t overlay overlay -o "lowerdir=$disk/lower,upperdir=$disk/upper,workdir=$disk/work" "$work/merged" || fail "second overlay mount"
describe "$work/merged" >"$work/merged.after"
same "$work/merged.before" "$work/merged.after" "the overlay before and after a remount"
umount "$work/merged"
say "overlay with upper, work and lower directories on a mount"

box=
for candidate in busybox /bin/busybox; do
  found=$(command -v $candidate 2>/dev/null) && ! ldd "$found" >/dev/null 2>&1 && { box=$found; break; } || true
done
if command -v buildah >/dev/null && [ -n "$box" ]; then
  export XDG_RUNTIME_DIR="$work/run" BUILDAH_ISOLATION=chroot
  mkdir -p "$work/run" "$work/ctx"
  printf '[containers]\n[engine]\n' >"$work/containers.conf"
  printf '{"default":[{"type":"insecureAcceptAnything"}]}\n' >"$work/policy.json"
  export CONTAINERS_CONF="$work/containers.conf"
  b() { buildah --root "$disk/storage" --runroot "$work/run/storage" --storage-driver overlay "$@"; }
  c=$(b from scratch) || fail "buildah from scratch"
  b copy "$c" "$box" /bin/busybox >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah copy"; }
  b run "$c" -- /bin/busybox mkdir -p /data /etc >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah run"; }
  b run "$c" -- /bin/busybox sh -c 'busybox seq 1000 >/data/numbers; busybox ln /data/numbers /data/again; busybox ln -s numbers /data/link; busybox chown 12:34 /data/numbers' 2>"$work/out" ||
    b run "$c" -- /bin/busybox sh -c '/bin/busybox seq 1000 >/data/numbers; /bin/busybox ln /data/numbers /data/again; /bin/busybox ln -s numbers /data/link; /bin/busybox chown 12:34 /data/numbers' >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah run of a script"; }
  b commit -q --signature-policy "$work/policy.json" "$c" first >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah commit"; }
  c2=$(b from --pull-never --signature-policy "$work/policy.json" localhost/first) || fail "buildah from the new image"
  b run "$c2" -- /bin/busybox rm /data/again >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah run in the second container"; }
  b commit -q --signature-policy "$work/policy.json" "$c2" second >"$work/out" 2>&1 || { cat "$work/out"; fail "second buildah commit"; }
  root=$(b mount "$c2") || fail "buildah mount"
  seq 1000 | cmp - "$root/data/numbers" || fail "a file of the container"
  expect "12:34 link numbers" "$(stat -c %u:%g "$root/data/numbers") $(ls "$root/data" | paste -sd' ')" "owner and names in the container"
  b umount "$c2" >/dev/null
  b push -q --signature-policy "$work/policy.json" second "oci-archive:$work/second.tar" >"$work/out" 2>&1 || { cat "$work/out"; fail "buildah push"; }
  b rm -a >/dev/null
  b rmi -a -f >/dev/null
  say "buildah: from, copy, run, commit, mount, push with the overlay driver"
fi
for point in $(awk -v under="$disk/" 'index($5, under) == 1 { print $5 }' /proc/self/mountinfo | sort -r); do umount "$point"; done
ubtrfs umount "$disk"
check_image "$work/disk.img"
