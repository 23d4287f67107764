#!/bin/sh
# Lines of /etc/fstab, as root by "mount -a" and as an ordinary user by "mount DIR", and systemd's view of them.
# Needs root, FUSE and loop devices (Debian: util-linux, fuse3; systemd for the last part).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need_loop
need mount findmnt unshare setpriv fusermount3
in_namespace -m "$@"

# mount(8) looks for helpers in /sbin only. In this namespace, the helpers of PROGRAMS are there.
sbin=$(readlink -f /sbin)
mkdir "$work/sbin" "$work/users"
cp "$programs/ubtrfs" "$work/users/ubtrfs"
chmod 755 "$work" "$work/users/ubtrfs"
for name in mount.ubtrfs mount.btrfs mount.fuse.ubtrfs umount.fuse.ubtrfs; do ln -s "$work/users/ubtrfs" "$work/sbin/$name"; done
mount -t overlay overlay -o "lowerdir=$work/sbin:$sbin" "$sbin" 2>/dev/null || skip "overlay mounts are not possible here"
cp /etc/fstab "$work/fstab.old" 2>/dev/null || : >"$work/fstab.old"
at_end() { umount /etc/fstab 2>/dev/null; umount "$sbin"; }

uuid=44cf2f2b-8eb6-4a9f-a99c-6d0ef9d8aa01
label=ubt$$
truncate -s 300M "$work/labelled.img" "$work/plain.img"
mkfs.btrfs -q -L $label -U $uuid "$work/labelled.img"
mkfs.btrfs -q "$work/plain.img"
for name in @ @home; do btrfs subvolume create "$work/labelled.img:/$name" >/dev/null; done
loop=$(losetup -f --show "$work/labelled.img")
mkdir "$work/m1" "$work/m2" "$work/m3" "$work/m4" "$work/never"
cat >"$work/fstab" <<EOF
LABEL=$label          $work/m1     ubtrfs       subvol=@,noatime,compress=zstd:3        0 0
UUID=$uuid            $work/m2     btrfs        subvol=@home,noatime,compress=zstd:3,nosuid,nodev   0 2
$work/plain.img       $work/m3     fuse.ubtrfs  noatime,x-ubtrfs,nofail                 0 0
$work/plain.img       $work/never  ubtrfs       noauto                                  0 0
EOF
mount --fstab "$work/fstab" -a >"$work/out" 2>&1 || { cat "$work/out"; fail "mount -a"; }
expect "/@ /@home /" "$(for m in m1 m2 m3; do findmnt -n -o FSROOT "$work/$m"; done | paste -sd' ')" "roots of the mounts"
! mountpoint -q "$work/never" || fail "a line with noauto was mounted"
findmnt -n -o OPTIONS "$work/m1" | grep -q noatime || fail "noatime is not in force"
findmnt -n -o OPTIONS "$work/m2" | grep -q 'nosuid.*nodev\|nodev.*nosuid' || fail "nosuid and nodev are not in force"
echo one >"$work/m1/file"
echo two >"$work/m2/file"
echo three >"$work/m3/file"
# A second "mount -a" finds everything mounted.
mount --fstab "$work/fstab" -a >"$work/out" 2>&1 || { cat "$work/out"; fail "the second mount -a"; }
expect 3 "$(grep -c " $work/m[123] " /proc/self/mountinfo)" "number of mounts after the second mount -a"
findmnt --verify --tab-file "$work/fstab" >"$work/out" 2>&1 || true
# findmnt knows only the type btrfs on a disk, so it objects to the type ubtrfs. The syntax has to be right.
grep -q '^0 parse errors' "$work/out" || grep -q '^Success' "$work/out" || { cat "$work/out"; fail "findmnt --verify"; }
mount --fstab "$work/fstab" -o remount,ro "$work/m3" || fail "remount,ro"
! touch "$work/m3/x" 2>/dev/null || fail "a mount is writable after remount,ro"
mount --fstab "$work/fstab" -o remount,rw "$work/m3" || fail "remount,rw"
umount "$work/m1" || fail "umount of a LABEL= line"
umount "$work/m2"
umount "$work/m3"
for image in labelled plain; do timeout 20 flock -x "$work/$image.img" true || fail "the image $image stays locked after umount"; done
losetup -d "$loop"
expect "one two three" "$(ubtrfs cat "$work/labelled.img:/@/file" "$work/labelled.img:/@home/file" "$work/plain.img:/file" | paste -sd' ')" "files after the unmount"
# With nofail, a device that does not exist is no error.
echo "/dev/no-such-device $work/never btrfs nofail 0 0" >"$work/fstab"
mount --fstab "$work/fstab" -a >"$work/out" 2>&1 || { cat "$work/out"; note "mount -a of a line with nofail whose device does not exist"; }
say "mount -a as root: LABEL=, UUID=, images, subvolumes, remount and umount"

# An ordinary user. mount(8) takes the option user only from /etc/fstab itself.
user=54321
mkdir "$work/box" "$work/closed"
truncate -s 300M "$work/box.img" "$work/closed.img"
chown $user:$user "$work/box" "$work/box.img" "$work/closed"
as_user() { setpriv --reuid=$user --regid=$user --clear-groups --inh-caps=-all env HOME="$work/box" PATH="$work/users:$system_path" "$@"; }
# The user needs a way to the files.
parent=$work
while [ "$parent" != / ]; do
  as_user test -x "$parent" || skip "the ordinary user cannot enter $parent"
  parent=$(dirname "$parent")
done
getent passwd $user >/dev/null || {
  # mount(8) and fusermount3 want a name for the user.
  { cat /etc/passwd; echo "ubtrfs-user:x:$user:$user::/:/bin/sh"; } >"$work/passwd"
  chmod 644 "$work/passwd"
  mount --bind "$work/passwd" /etc/passwd
}
at_end() { umount /etc/passwd /etc/fstab 2>/dev/null; umount "$sbin"; }
as_user ubtrfs mkfs -q "$work/box.img"
ubtrfs mkfs -q "$work/closed.img"
chmod 600 "$work/closed.img"
cat >"$work/fstab" <<EOF
$work/box.img     $work/box     ubtrfs  user,noauto,noatime  0 0
$work/closed.img  $work/closed  ubtrfs  user,noauto          0 0
EOF
chmod 644 "$work/fstab"
[ -e /etc/fstab ] || skip "/etc/fstab is missing"
mount --bind "$work/fstab" /etc/fstab
as_user mount "$work/box" >"$work/out" 2>&1 || { cat "$work/out"; fail "mount by an ordinary user"; }
findmnt -n -o OPTIONS "$work/box" | grep nosuid | grep nodev | grep -q "user_id=$user" || fail "options of the user's mount: $(findmnt -n -o OPTIONS "$work/box")"
as_user sh -c "echo mine >'$work/box/file'" || fail "write by the user"
! as_user mount "$work/closed" 2>/dev/null || fail "a user mounted an image of root"
as_user umount "$work/box" >"$work/out" 2>&1 || { cat "$work/out"; fail "umount by an ordinary user"; }
timeout 20 flock -x "$work/box.img" true || fail "the user's image stays locked after umount"
expect mine "$(as_user ubtrfs cat "$work/box.img:/file")" "the user's file after the unmount"
umount /etc/fstab
say "mount and umount by an ordinary user"

# systemd makes units from the same lines.
generator=/usr/lib/systemd/system-generators/systemd-fstab-generator
if [ -x $generator ] && command -v systemd-analyze >/dev/null; then
  mkdir "$work/units"
  cat >"$work/fstab" <<EOF
LABEL=$label           /srv/one  ubtrfs  subvol=@,noatime   0 0
$work/plain.img        /srv/two  ubtrfs  nofail             0 0
EOF
  SYSTEMD_FSTAB=$work/fstab $generator "$work/units" "$work/units" "$work/units" || fail "systemd-fstab-generator"
  grep -qx 'Type=ubtrfs' "$work/units/srv-one.mount" || fail "the unit has no Type=ubtrfs"
  cat >"$work/units/srv-data.mount" <<EOF
[Unit]
Description=Data on a btrfs image
[Mount]
What=$work/plain.img
Where=/srv/data
Type=ubtrfs
Options=compress=zstd:3
TimeoutSec=10min
[Install]
WantedBy=multi-user.target
EOF
  SYSTEMD_LOG_LEVEL=warning systemd-analyze verify "$work/units/srv-data.mount" >"$work/out" 2>&1 || { cat "$work/out"; fail "systemd-analyze verify"; }
  ! grep -q 'srv-data' "$work/out" || { cat "$work/out"; fail "systemd-analyze verify has remarks"; }
  say "systemd: units from fstab, and a unit of one's own"
fi
