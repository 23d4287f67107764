#!/bin/sh
# Backup programs save a snapshot from a mount into a repository on another mount, and restore it.
# A second backup after a remount must find nothing changed, because inode numbers and times are the same.
# Needs FUSE, and any of borg, restic, rclone, rsnapshot, rdiff-backup, casync, bup, rsync
# (Debian: borgbackup restic rclone rsnapshot rdiff-backup casync bup rsync attr acl).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_fuse
HOME=$work/home
mkdir "$HOME"
export HOME
have() { command -v "$1" >/dev/null; }
ran=

make_mount source 512M
make_mount repo 1G
btrfs subvolume create "$work/source/data" >/dev/null
make_tree "$work/source/data"
# rsync leaves the times of directories alone if the seconds are right already. So the times are old.
find "$work/source/data" ! -name 5.txt -exec touch -h -d '2020-03-04 05:06:07.123456789' {} +
# borg always reads the newest files again.
sleep 0.1
echo last >"$work/source/data/newest"
btrfs subvolume snapshot -r "$work/source/data" "$work/source/snap" >/dev/null
tree=$work/source/snap
describe "$tree" >"$work/wanted"
# Programs without support for attributes and access lists are judged by the rest.
simple() { grep -v '^# file' | awk '{ sub(/ [0-9]+\.[0-9]+/, ""); print }'; }
remount() {
  ubtrfs umount "$work/source"
  ubtrfs mount "$work/source.img" "$work/source"
}
restored() { # NAME DIR
  describe "$2" >"$work/got"
  same "$work/wanted" "$work/got" "the tree and the restored tree of $1"
  ran="$ran $1"
}

if have borg; then
  export BORG_BASE_DIR=$work/home BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK=yes BORG_RELOCATED_REPO_ACCESS_IS_OK=yes
  borg init -e none "$work/repo/borg"
  (cd "$tree" && borg create --stats "$work/repo/borg::one" .) >"$work/out" 2>&1 || { cat "$work/out"; fail "borg create"; }
  remount
  (cd "$tree" && borg create --list --filter AM "$work/repo/borg::two" .) >"$work/out" 2>&1 || { cat "$work/out"; fail "the second borg create"; }
  ! grep -qv 'newest$' "$work/out" || { cat "$work/out"; fail "borg found changes after a remount"; }
  borg check --verify-data "$work/repo/borg" || fail "borg check"
  mkdir "$work/source/borg"
  (cd "$work/source/borg" && borg extract "$work/repo/borg::two") || fail "borg extract"
  restored borg "$work/source/borg"
fi

if have restic; then
  export RESTIC_PASSWORD=x RESTIC_CACHE_DIR=$work/home/restic
  restic -q -r "$work/repo/restic" init || fail "restic init"
  restic -q -r "$work/repo/restic" backup "$tree" || fail "restic backup"
  remount
  restic -r "$work/repo/restic" backup "$tree" >"$work/out" || fail "the second restic backup"
  grep -q 'Files: *0 new, *0 changed' "$work/out" || { cat "$work/out"; fail "restic found changes after a remount"; }
  restic -q -r "$work/repo/restic" check --read-data || fail "restic check"
  restic -q -r "$work/repo/restic" restore latest --target "$work/source/restic" || fail "restic restore"
  # Older versions restore no access lists, and give named pipes and links their own times.
  describe "$work/source/restic$tree" | grep -v 'posix_acl\|^[pl] ' >"$work/got"
  grep -v 'posix_acl\|^[pl] ' "$work/wanted" >"$work/left"
  same "$work/left" "$work/got" "the tree and the restored tree of restic"
  ran="$ran restic"
fi

if have rclone; then
  export RCLONE_CONFIG=$work/home/rclone.conf
  : >"$RCLONE_CONFIG"
  rclone sync -q --links "$tree" "$work/repo/rclone" 2>"$work/out" || { cat "$work/out"; fail "rclone sync"; }
  rclone check -q --links "$tree" "$work/repo/rclone" 2>"$work/out" || { cat "$work/out"; fail "rclone check"; }
  remount
  rclone sync --links --stats-one-line -v "$tree" "$work/repo/rclone" >"$work/out" 2>&1 || fail "the second rclone sync"
  ! grep -q 'Copied' "$work/out" || { cat "$work/out"; fail "rclone found changes after a remount"; }
  ran="$ran rclone"
fi

if have rsync; then
  rsync -aHAXS "$tree/" "$work/repo/rsync/" || fail "rsync -aHAXS"
  describe "$work/repo/rsync" >"$work/got"
  same "$work/wanted" "$work/got" "the tree and the copy of rsync"
  remount
  rsync -aHAXSi --delete "$tree/" "$work/repo/rsync/" >"$work/out"
  [ ! -s "$work/out" ] || { cat "$work/out"; fail "rsync found changes after a remount"; }
  ran="$ran rsync"
fi

if have rsnapshot && have rsync; then
  printf '%s\t%s\n' config_version 1.2 snapshot_root "$work/repo/rsnapshot/" cmd_rsync "$(command -v rsync)" cmd_cp "$(command -v cp)" \
    cmd_rm "$(command -v rm)" retain daily >"$work/rsnapshot.conf"
  sed -i '$d' "$work/rsnapshot.conf"
  printf 'retain\tdaily\t3\nrsync_long_args\t--delete --numeric-ids --relative\nlink_dest\t0\nlockfile\t%s\nbackup\t%s\tlocal/\n' "$work/rsnapshot.lock" "$tree/" >>"$work/rsnapshot.conf"
  for i in 1 2 3 4; do rsnapshot -c "$work/rsnapshot.conf" daily >"$work/out" 2>&1 || { cat "$work/out"; fail "rsnapshot $i"; }; done
  expect "daily.0 daily.1 daily.2" "$(ls "$work/repo/rsnapshot" | paste -sd' ')" "rotations of rsnapshot"
  # Unchanged files are one file with several names.
  expect 3 "$(stat -c %h "$work/repo/rsnapshot/daily.0/local$tree/bin/big")" "links of an unchanged file"
  cmp "$tree/bin/big" "$work/repo/rsnapshot/daily.2/local$tree/bin/big" || fail "a file of rsnapshot"
  ran="$ran rsnapshot"
fi

if have rdiff-backup; then
  rdiff-backup "$work/source/data" "$work/repo/rdiff" >"$work/out" 2>&1 || { cat "$work/out"; fail "rdiff-backup"; }
  rdiff-backup --compare-hash "$work/source/data" "$work/repo/rdiff" >"$work/out" 2>&1 || { cat "$work/out"; fail "rdiff-backup --compare-hash"; }
  rdiff-backup -r now "$work/repo/rdiff" "$work/source/rdiff" >"$work/out" 2>&1 || { cat "$work/out"; fail "rdiff-backup restore"; }
  cmp "$tree/bin/big" "$work/source/rdiff/bin/big" || fail "a file of rdiff-backup"
  ran="$ran rdiff-backup"
fi

if have casync; then
  (cd "$work/repo" && casync make --store=casync.castr --with=unix --with=xattrs --with=acl --without=privileged tree.caidx "$tree") >"$work/out" 2>&1 ||
    (cd "$work/repo" && casync make --store=casync.castr --with=unix tree.caidx "$tree") >"$work/out" 2>&1 || { cat "$work/out"; fail "casync make"; }
  (cd "$work/repo" && casync extract --store=casync.castr tree.caidx "$work/source/casync") >"$work/out" 2>&1 || { cat "$work/out"; fail "casync extract"; }
  cmp "$tree/bin/big" "$work/source/casync/bin/big" || fail "a file of casync"
  ran="$ran casync"
fi

if have bup; then
  export BUP_DIR=$work/repo/bup
  bup init >/dev/null 2>&1 && bup index "$tree" 2>/dev/null && bup save -q -n tree "$tree" 2>/dev/null || fail "bup save"
  remount
  bup index -s "$tree" >"$work/out" 2>/dev/null
  ! grep -q '^[AM] .*bin/big' "$work/out" || { cat "$work/out"; fail "bup found changes after a remount"; }
  bup restore -q -C "$work/source/bup" "tree/latest$tree/." 2>"$work/out" || { cat "$work/out"; fail "bup restore"; }
  cmp "$tree/bin/big" "$work/source/bup/bin/big" || fail "a file of bup"
  ran="$ran bup"
fi

[ -n "$ran" ] || skip "none of borg, restic, rclone, rsync, rsnapshot, rdiff-backup, casync and bup is installed"
say "saved and restored by:$ran"
ubtrfs umount "$work/source" "$work/repo"
check_image "$work/source.img"
check_image "$work/repo.img"
