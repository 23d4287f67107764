#!/bin/sh
# btrbk makes snapshots and backups for eight days, between two mounts of ubtrfs, and into files.
# Needs root, FUSE, btrbk and faketime (Debian: btrbk faketime attr acl).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need btrbk faketime perl

# btrbk asks "cat /proc/self/mountinfo" for the type of a mount, and wants "btrfs".
# This cat changes the type in that one file. btrbk itself is not modified.
mkdir "$work/wrap"
cat >"$work/wrap/cat" <<'EOF'
#!/bin/sh
[ "$*" = /proc/self/mountinfo ] || exec /bin/cat "$@"
exec sed 's/ - fuse\.ubtrfs / - btrfs /' "$@"
EOF
chmod +x "$work/wrap/cat"

make_mount source 512M
make_mount target 512M
mkdir "$work/source/snapshots" "$work/target/backups" "$work/raw" "$work/days"
btrfs subvolume create "$work/source/home" >/dev/null
make_tree "$work/source/home"
cat >"$work/btrbk.conf" <<EOF
timestamp_format        short
snapshot_preserve_min   latest
snapshot_preserve       3d
target_preserve_min     no
target_preserve         5d 1w
preserve_day_of_week    monday
lockfile                $work/lock
transaction_log         $work/transactions
volume $work/source
  snapshot_dir          snapshots
  subvolume home
    target              $work/target/backups
    target raw          $work/raw
EOF

# Changes of a day: new, changed, renamed and removed files, holes and attributes.
change() {
  (cd "$work/source/home"
    mkdir "day$1"
    seq "$1" 5000 >"day$1/new"
    date -u -d "2026-03-0$1" >docs/today
    mv "docs/$1.txt" "day$1/moved"
    printf 'change %s' "$1" | dd of=bin/big bs=1 seek=$(($1 * 300000)) conv=notrunc 2>/dev/null
    cp --reflink=auto bin/big "day$1/clone"
    fallocate -p -o $(($1 * 100000)) -l 8192 bin/copy
    truncate -s $((5000000 + $1)) docs/sparse
    chmod 60$(($1 % 8)) bin/copy
    [ "$1" -lt 3 ] || { rm -r "day$(($1 - 2))"; mv "day$(($1 - 1))" "day$(($1 - 1))-old" && mv "day$(($1 - 1))-old" "day$(($1 - 1))"; }
    ! command -v setfattr >/dev/null || setfattr -n user.day -v "$1" docs)
}

for day in 1 2 3 4 5 6 7 8; do
  change $day
  describe "$work/source/home" >"$work/days/2026030$day"
  PATH=$work/wrap:$PATH faketime -f "@2026-03-0$day 12:00:00" btrbk -c "$work/btrbk.conf" -q run >"$work/btrbk.out" 2>&1 ||
    { cat "$work/btrbk.out"; fail "btrbk on day $day"; }
  [ ! -s "$work/btrbk.out" ] || { cat "$work/btrbk.out"; fail "btrbk printed a warning on day $day"; }
  same_trees "$work/source/snapshots/home.2026030$day" "$work/target/backups/home.2026030$day"
done
say "8 runs of btrbk, incremental from the second on"

# What retention leaves: three days and the newest; five days, and a week that begins on Monday.
expect "20260305 20260306 20260307 20260308" "$(ls "$work/source/snapshots" | sed 's/home\.//' | paste -sd' ')" "snapshots after retention"
ls "$work/target/backups" | sed 's/home\.//' >"$work/kept"
expect "20260301 20260302 20260303 20260304 20260305 20260306 20260307 20260308" "$(paste -sd' ' "$work/kept")" "backups after retention"
while read -r day; do
  describe "$work/target/backups/home.$day" >"$work/left"
  same "$work/days/$day" "$work/left" "the backup of $day and the files of that day"
done <"$work/kept"
expect 8 "$(btrfs subvolume list -o "$work/target" | wc -l)" "number of subvolumes at the target"
# Each backup has the UUID of its snapshot, so that the next increment finds it.
for day in 20260305 20260306 20260307 20260308; do
  uuid=$(btrfs subvolume show "$work/source/snapshots/home.$day" | awk '$1 == "UUID:" { print $2 }')
  received=$(btrfs subvolume show "$work/target/backups/home.$day" | awk '$1 == "Received" { print $3 }')
  expect "$uuid" "$received" "received UUID of $day"
done
say "retention, trees and received UUIDs are right"

# btrbk's own views of the state.
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" list latest >"$work/out"
grep -q "home.20260308 " "$work/out" || { cat "$work/out"; fail "btrbk list latest"; }
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" stats >"$work/out" || fail "btrbk stats"
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" usage >"$work/out" 2>/dev/null || fail "btrbk usage"
PATH=$work/wrap:$PATH btrbk diff "$work/source/snapshots/home.20260307" "$work/source/snapshots/home.20260308" >"$work/out" || fail "btrbk diff"
grep -q 'day8/new' "$work/out" || { cat "$work/out"; fail "btrbk diff does not name a new file"; }
say "btrbk list, stats, usage and diff answer"

# An archive of all backups on a third mount, and the cleaning of an interrupted backup.
make_mount archive 512M
mkdir "$work/archive/all"
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" -q --override=archive_preserve_min=all \
  archive "$work/target/backups" "$work/archive/all" >"$work/out" 2>&1 || { cat "$work/out"; fail "btrbk archive"; }
same_trees "$work/target/backups/home.20260308" "$work/archive/all/home.20260308"
same_trees "$work/target/backups/home.20260304" "$work/archive/all/home.20260304"
btrfs subvolume snapshot "$work/target/backups/home.20260307" "$work/target/backups/home.20260309" >/dev/null
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" -q clean >"$work/out" 2>&1 || { cat "$work/out"; fail "btrbk clean"; }
[ ! -e "$work/target/backups/home.20260309" ] || fail "btrbk clean left a subvolume without a received UUID"
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" list all >"$work/out" || fail "btrbk list all"
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" origin "$work/target/backups/home.20260308" >"$work/out" 2>&1 || { cat "$work/out"; fail "btrbk origin"; }
PATH=$work/wrap:$PATH btrbk -c "$work/btrbk.conf" ls "$work/target" >"$work/out" 2>&1 || { cat "$work/out"; fail "btrbk ls"; }
expect 8 "$(grep -c 'home\.' "$work/out")" "subvolumes in btrbk ls"
say "btrbk archive, clean, origin and ls"

# The raw files are a full stream and increments. Received in order, they give the same trees.
make_mount restored 512M
for file in $(ls "$work/raw" | grep -v 'info$' | sort); do
  btrfs receive -q -f "$work/raw/$file" "$work/restored" 2>"$work/out" || { cat "$work/out"; fail "receive of $file"; }
done
describe "$work/restored/home.20260308" >"$work/left"
same "$work/days/20260308" "$work/left" "the restored raw backup and the files of that day"
say "raw targets restore"

for name in source target archive restored; do ubtrfs umount "$work/$name"; done
for name in source target archive restored; do check_image "$work/$name.img"; done
if linux_btrfs && linux_mount "$work/target.img" "$work/linux" 2>/dev/null; then
  while read -r day; do
    describe "$work/linux/backups/home.$day" >"$work/left"
    same "$work/days/$day" "$work/left" "Linux's view of the backup of $day"
  done <"$work/kept"
  umount "$work/linux"
  say "Linux sees the same backups"
fi
