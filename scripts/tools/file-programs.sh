#!/bin/sh
# Programs that work hard on files: git, sqlite3, qemu-img, cp, dpkg, ostree, and filesystems on top of the mount.
# Needs FUSE, and any of these programs (Debian: git sqlite3 qemu-utils ostree bindfs mergerfs gocryptfs).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_fuse
have() { command -v "$1" >/dev/null; }
ran=
make_mount disk 1G -L files
disk=$work/disk
HOME=$work/home
mkdir "$HOME"
export HOME

if have git; then
  git -C "$disk" -c init.defaultBranch=main init -q repo
  cd "$disk/repo"
  git config user.name test
  git config user.email test@example.org
  make_tree "$disk/repo"
  rm -f docs/pipe
  git add -A && git commit -q -m one
  git checkout -q -b side && echo side >docs/side && git add -A && git commit -q -m two
  git checkout -q main && git merge -q side && git gc -q --aggressive --prune=now && git fsck --strict 2>/dev/null || fail "git"
  expect "" "$(git status --porcelain)" "git status"
  cd "$work"
  git clone -q "$disk/repo" "$disk/clone" 2>/dev/null || fail "git clone"
  ubtrfs umount "$disk" && ubtrfs mount "$work/disk.img" "$disk"
  # An unchanged index after a remount means the same inode numbers and times.
  git -C "$disk/repo" diff-files --quiet || fail "git sees changes after a remount"
  ran="$ran git"
fi

if have sqlite3; then
  for mode in delete wal; do
    sqlite3 "$disk/$mode.db" "pragma journal_mode=$mode; create table t(a integer primary key, b blob);
      with recursive n(i) as (select 1 union all select i+1 from n where i < 20000) insert into t select i, randomblob(100) from n;
      begin; update t set b = randomblob(200) where a % 3 = 0; delete from t where a % 5 = 0; commit; vacuum;" >/dev/null || fail "sqlite3 with journal_mode=$mode"
    expect "ok 16000" "$(sqlite3 "$disk/$mode.db" 'pragma integrity_check; select count(*) from t;' | paste -sd' ')" "sqlite3 with journal_mode=$mode"
  done
  # Locks between two processes.
  (echo 'begin immediate;'; sleep 1; echo 'commit;') | sqlite3 "$disk/delete.db" &
  sleep 0.3
  ! sqlite3 "$disk/delete.db" 'begin immediate;' 2>/dev/null || fail "two writers at the same time"
  wait
  ran="$ran sqlite3"
fi

if have qemu-img; then
  head -c 30000000 /dev/urandom >"$work/raw"
  truncate -s 60M "$work/raw"
  qemu-img convert -f raw -O qcow2 "$work/raw" "$disk/image.qcow2" || fail "qemu-img convert"
  qemu-img convert -f qcow2 -O raw "$disk/image.qcow2" "$disk/image.raw" || fail "qemu-img convert back"
  cmp "$work/raw" "$disk/image.raw" || fail "an image after conversions"
  [ "$(stat -c %b "$disk/image.raw")" -lt 70000 ] || fail "qemu-img made no holes"
  qemu-img create -q -f raw -o preallocation=falloc "$disk/falloc" 20M || fail "preallocation=falloc"
  qemu-img create -q -f raw -o nocow=on "$disk/nocow" 20M || fail "nocow=on"
  ! have lsattr || lsattr "$disk/nocow" | grep -q '^[^ ]*C' || fail "nocow=on has no effect"
  qemu-img snapshot -c one "$disk/image.qcow2" && qemu-img check -q "$disk/image.qcow2" || fail "qemu-img snapshot and check"
  ran="$ran qemu-img"
fi

head -c 20000000 /dev/urandom >"$disk/big"
cp --reflink=auto "$disk/big" "$disk/big.copy"
cmp "$disk/big" "$disk/big.copy" || fail "cp --reflink=auto"
btrfs filesystem sync "$disk" >/dev/null
expect "0.00B" "$(btrfs filesystem du "$disk/big.copy" | awk 'END { print $2 }')" "exclusive bytes of a copy by cp --reflink=auto"
btrfs filesystem defragment -r -czstd "$disk" || fail "filesystem defragment -r"
cmp "$disk/big" "$disk/big.copy" || fail "defragment"
ran="$ran cp"

if have dpkg-deb; then
  mkdir -p "$work/pkg/DEBIAN" "$work/pkg/usr/share/ubtrfs-test" "$disk/root/var/lib/dpkg/updates" "$disk/root/var/lib/dpkg/info"
  : >"$disk/root/var/lib/dpkg/status"
  : >"$disk/root/var/lib/dpkg/available"
  printf 'Package: ubtrfs-test\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' >"$work/pkg/DEBIAN/control"
  i=0
  while [ $i -lt 300 ]; do echo $i >"$work/pkg/usr/share/ubtrfs-test/$i"; i=$((i + 1)); done
  dpkg-deb -b "$work/pkg" "$work/pkg.deb" >/dev/null
  dpkg --root="$disk/root" --force-not-root --force-bad-path --unpack "$work/pkg.deb" >"$work/out" 2>&1 || { cat "$work/out"; fail "dpkg --unpack"; }
  expect 300 "$(ls "$disk/root/usr/share/ubtrfs-test" | wc -l)" "files after dpkg"
  ran="$ran dpkg"
fi

if have ostree; then
  ostree --repo="$disk/ostree" init --mode=bare-user
  mkdir "$work/tree"
  make_tree "$work/tree"
  rm "$work/tree/docs/pipe"
  ostree --repo="$disk/ostree" commit -b main -s one "$work/tree" >/dev/null || fail "ostree commit"
  ostree --repo="$disk/ostree" checkout -U main "$disk/deploy" || fail "ostree checkout"
  cmp "$work/tree/bin/big" "$disk/deploy/bin/big" || fail "a file of ostree"
  ostree --repo="$disk/ostree" fsck -q >/dev/null 2>&1 || fail "ostree fsck"
  ran="$ran ostree"
fi

mkdir "$work/over"
make_tree "$disk/clone" 2>/dev/null || { mkdir -p "$disk/clone"; make_tree "$disk/clone"; }
for program in bindfs mergerfs gocryptfs; do
  have $program || continue
  # mergerfs mounts for all users.
  [ $program != mergerfs ] || [ "$(id -u)" -eq 0 ] || continue
  case $program in
    gocryptfs) mkdir "$disk/cipher"; echo pw >"$work/pw"; gocryptfs -q -init -passfile "$work/pw" "$disk/cipher" && gocryptfs -q -passfile "$work/pw" "$disk/cipher" "$work/over" || fail "gocryptfs" ;;
    mergerfs) mkdir -p "$disk/m1" "$disk/m2"; mergerfs -o minfreespace=1M "$disk/m1:$disk/m2" "$work/over" || fail "mergerfs" ;;
    bindfs) mkdir "$disk/bound"; bindfs --no-allow-other "$disk/bound" "$work/over" || fail "bindfs" ;;
  esac
  cp -r "$disk/clone/docs/deep" "$disk/clone/bin/big" "$work/over/" || fail "cp to $program"
  mv "$work/over/big" "$work/over/moved"
  cmp "$disk/clone/bin/big" "$work/over/moved" || fail "a file through $program"
  rm -r "$work/over/deep"
  umount "$work/over" 2>/dev/null || fusermount3 -u "$work/over"
  ran="$ran $program"
done

ubtrfs umount "$disk"
check_image "$work/disk.img"
say "worked:$ran"
