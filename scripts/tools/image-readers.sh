#!/bin/sh
# Other programs that read btrfs themselves: GRUB, partclone, fsarchiver, file, and Linux.
# Needs at least one of them; fsarchiver needs root and loop devices (Debian: grub-common partclone fsarchiver file).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
ran=

mkdir "$work/tree"
make_tree "$work/tree"
rm "$work/tree/docs/pipe"
# One image for each kind of compression, with a subvolume and a snapshot.
for method in none zlib lzo zstd; do
  ubtrfs mkfs -q -b 400M -L "$method" "$work/$method.img"
  btrfs subvolume create "$work/$method.img:/sub" >/dev/null
  option=
  [ $method = none ] || option="-o compress=$method"
  tar -C "$work/tree" --xattrs --acls -c . 2>/dev/null | ubtrfs import $option - "$work/$method.img:/sub" >"$work/out" 2>&1 || fail "import with $method"
  btrfs subvolume snapshot "$work/$method.img:/sub" "$work/$method.img:/snap" >/dev/null
  ubtrfs rm "$work/$method.img:/sub/docs/1.txt"
done
expect "sub/docs/1.txt is gone" "$(ubtrfs ls "$work/none.img:/sub/docs" | grep -q '^1.txt' || echo "sub/docs/1.txt is gone")" "removed file"

if command -v grub-fstest >/dev/null; then
  for method in none zlib lzo zstd; do
    for file in bin/big docs/1.txt docs/8.txt docs/sparse docs/deep/er/nothing; do
      grub-fstest "$work/$method.img" cp "/snap/$file" "$work/out" 2>"$work/err" || { cat "$work/err"; fail "GRUB cannot read $file with $method"; }
      cmp "$work/tree/$file" "$work/out" || fail "GRUB reads another content of $file with $method"
    done
    grub-fstest "$work/$method.img" ls /snap/docs/ | tr ' ' '\n' | grep -qx 8.txt || fail "GRUB's list of a directory"
    ! grub-fstest "$work/$method.img" cp /sub/docs/1.txt "$work/out" 2>/dev/null || fail "GRUB reads a removed file"
  done
  ran="$ran grub-fstest"
fi

if command -v partclone.btrfs >/dev/null && [ "$(id -u)" -eq 0 ]; then
  for method in none zstd; do
    partclone.btrfs -c -s "$work/$method.img" -o "$work/clone" -L "$work/log" >"$work/out" 2>&1 || { tail -n 5 "$work/out"; fail "partclone -c"; }
    truncate -s 400M "$work/restored.img"
    partclone.btrfs -r -O "$work/restored.img" -s "$work/clone" -L "$work/log" >"$work/out" 2>&1 || { tail -n 5 "$work/out"; fail "partclone -r"; }
    # partclone copies one of the two copies of metadata. A scrub makes the second one again.
    ubtrfs scrub start -B "$work/restored.img" >"$work/out" 2>&1 || true
    check_image "$work/restored.img"
    ubtrfs cat "$work/restored.img:/snap/bin/big" | cmp - "$work/tree/bin/big" || fail "a file after partclone"
    rm "$work/clone" "$work/restored.img"
  done
  ran="$ran partclone"
fi

if command -v fsarchiver >/dev/null && [ "$(id -u)" -eq 0 ] && linux_btrfs; then
  need_loop
  loop=$(losetup -f --show "$work/zstd.img")
  fsarchiver -o savefs "$work/archive.fsa" "$loop" >"$work/out" 2>&1 || { cat "$work/out"; fail "fsarchiver savefs"; }
  losetup -d "$loop"
  truncate -s 400M "$work/fsa.img"
  loop=$(losetup -f --show "$work/fsa.img")
  # fsarchiver makes the new filesystem with the mkfs.btrfs that it finds first.
  fsarchiver restfs "$work/archive.fsa" "id=0,dest=$loop" >"$work/out" 2>&1 || { cat "$work/out"; fail "fsarchiver restfs"; }
  losetup -d "$loop"
  check_image "$work/fsa.img"
  ubtrfs cat "$work/fsa.img:/snap/bin/big" | cmp - "$work/tree/bin/big" || fail "a file after fsarchiver"
  ran="$ran fsarchiver"
fi

if command -v file >/dev/null; then
  file -b "$work/none.img" | grep -q '^BTRFS Filesystem label "none"' || { file -b "$work/none.img"; fail "file"; }
  ran="$ran file"
fi

if linux_btrfs; then
  for method in none zlib lzo zstd; do
    linux_mount "$work/$method.img" "$work/linux"
    (cd "$work/linux/snap" && find . -type f -exec sha256sum {} +) | sort >"$work/left"
    (cd "$work/tree" && find . -type f -exec sha256sum {} +) | sort >"$work/right"
    same "$work/left" "$work/right" "Linux's view of $method and the tree"
    umount "$work/linux"
  done
  ran="$ran Linux"
fi
for method in none zlib lzo zstd; do check_image "$work/$method.img"; done
[ -n "$ran" ] || skip "none of the programs is installed"
say "read by:$ran"
