#!/bin/sh
# The scripts of btrfsmaintenance balance, scrub, trim and defragment a mount.
# Needs root, FUSE, loop devices and btrfsmaintenance (Debian: btrfsmaintenance).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need unshare bash findmnt ionice
scripts=/usr/share/btrfsmaintenance
[ -x $scripts/btrfs-balance.sh ] || [ -e $scripts/btrfs-balance.sh ] || skip "btrfsmaintenance is not installed"
in_namespace -m "$@"

# The scripts ask "stat -f" for the type of a filesystem, and statfs(2) of a FUSE mount cannot say btrfs.
# This stat does. The scripts themselves are not modified. They set PATH to /sbin first, so both are put there.
mkdir "$work/wrap"
cat >"$work/wrap/stat" <<'EOF'
#!/bin/sh
if [ "$1 $2" = "-f --format=%T" ] && [ "$(findmnt -n -o FSTYPE -T "$3")" = fuse.ubtrfs ]; then echo btrfs; exit; fi
exec /usr/bin/stat "$@"
EOF
chmod +x "$work/wrap/stat"
ln -s "$programs/ubtrfs" "$work/wrap/btrfs"
sbin=$(readlink -f /sbin)
mount -t overlay overlay -o "lowerdir=$work/wrap:$sbin" "$sbin" 2>/dev/null || skip "overlay mounts are not possible here"

ubtrfs mkfs -q -b 512M "$work/disk.img"
loop=$(losetup -f --show "$work/disk.img")
dir=$work/dir
mkdir "$dir"
ubtrfs mount "$loop" "$dir"
btrfs subvolume create "$dir/sub" >/dev/null
make_tree "$dir/sub"
for i in 1 2 3 4 5 6; do head -c 20000000 /dev/urandom >"$dir/sub/fill$i"; done
btrfs filesystem sync "$dir" >/dev/null
rm "$dir"/sub/fill[2-6]
btrfs filesystem sync "$dir" >/dev/null
describe "$dir" >"$work/before"

cat >"$work/conf" <<EOF
BTRFS_LOG_OUTPUT=stdout
BTRFS_DEFRAG_PATHS=$dir/sub
BTRFS_DEFRAG_MIN_SIZE=+100k
BTRFS_BALANCE_MOUNTPOINTS=$dir
BTRFS_BALANCE_DUSAGE="0 50"
BTRFS_BALANCE_MUSAGE="0 30"
BTRFS_SCRUB_MOUNTPOINTS=$dir
BTRFS_SCRUB_PRIORITY=idle
BTRFS_SCRUB_READ_ONLY=false
BTRFS_TRIM_MOUNTPOINTS=$dir
EOF
conf=/etc/default/btrfsmaintenance
[ -e $conf ] || conf=/etc/sysconfig/btrfsmaintenance
[ -e $conf ] || skip "the configuration of btrfsmaintenance was not found"
mount --bind "$work/conf" $conf
at_end() { umount $conf "$sbin"; }
for task in balance scrub trim defrag; do
  bash $scripts/btrfs-$task.sh >"$work/out" 2>&1 || { cat "$work/out"; fail "btrfs-$task.sh"; }
  ! grep -qi 'skipping\|error:\|not supported\|invalid\|usage:' "$work/out" || { cat "$work/out"; fail "btrfs-$task.sh had an error"; }
  case $task in
    balance) grep -q 'Done, had to relocate' "$work/out" || { cat "$work/out"; fail "no result of the balance"; } ;;
    scrub) grep -q 'no errors found' "$work/out" || { cat "$work/out"; fail "no result of the scrub"; } ;;
    trim) grep -q 'trimmed' "$work/out" || { cat "$work/out"; fail "no result of fstrim"; } ;;
  esac
  describe "$dir" >"$work/after"
  same "$work/before" "$work/after" "the trees before and after btrfs-$task.sh"
done
say "balance, scrub, trim and defragmentation by btrfsmaintenance"
ubtrfs umount "$dir"
losetup -d "$loop"
check_image "$work/disk.img"
