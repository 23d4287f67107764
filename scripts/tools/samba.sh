#!/bin/sh
# Samba shows snapshots as previous versions: smbd serves a mount on a port of 127.0.0.1, smbclient reads it.
# The modules shadow_copy2 and btrfs are tested. Needs root and FUSE (Debian: samba samba-vfs-modules smbclient).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need smbd smbclient testparm

make_mount share 512M
share=$work/share
btrfs subvolume create "$share/data" >/dev/null
mkdir "$share/data/.snapshots"
make_tree "$share/data"
# The names of snapshots are the times that Samba wants.
echo first >"$share/data/report"
btrfs subvolume snapshot -r "$share/data" "$share/data/.snapshots/@GMT-2026.03.01-12.00.00" >/dev/null
echo second >"$share/data/report"
rm "$share/data/docs/2.txt"
btrfs subvolume snapshot -r "$share/data" "$share/data/.snapshots/@GMT-2026.03.02-12.00.00" >/dev/null
echo third >"$share/data/report"

mkdir -p "$work/smb/private" "$work/smb/run"
port=44$((100 + $$ % 800))
cat >"$work/smb/conf" <<EOF
[global]
server role = standalone server
map to guest = bad user
guest account = root
interfaces = 127.0.0.1
bind interfaces only = yes
smb ports = $port
disable netbios = yes
load printers = no
rpc_daemon:lsasd = disabled
rpc_daemon:spoolssd = disabled
private dir = $work/smb/private
lock directory = $work/smb/run
state directory = $work/smb/run
cache directory = $work/smb/run
pid directory = $work/smb/run
ncalrpc dir = $work/smb/run/ncalrpc
log file = $work/smb/log.%m
[shadow]
path = $share/data
guest ok = yes
read only = no
vfs objects = shadow_copy2
# Samba finds the top of a subvolume by its device number. All subvolumes of a mount of ubtrfs have the same one.
shadow:mountpoint = $share/data
shadow:snapdir = .snapshots
shadow:format = @GMT-%Y.%m.%d-%H.%M.%S
shadow:sort = desc
store dos attributes = yes
[btrfs]
path = $share/data
guest ok = yes
read only = no
vfs objects = btrfs
EOF
testparm -s "$work/smb/conf" >/dev/null 2>"$work/out" || { cat "$work/out"; fail "testparm"; }
smbd -F -s "$work/smb/conf" </dev/null >"$work/smb/out" 2>&1 &
server=$!
at_end() { kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; }
smb() { # SHARE COMMANDS
  smbclient -N -s "$work/smb/conf" -p "$port" "//127.0.0.1/$1" -c "$2" 2>&1
}
tries=0
until smb shadow ls >"$work/out"; do
  tries=$((tries + 1))
  kill -0 "$server" 2>/dev/null || { cat "$work/smb/out" "$work"/smb/log.*; fail "smbd ended"; }
  [ $tries -lt 50 ] || { cat "$work/out"; fail "smbd does not answer"; }
  sleep 0.1
done

# Ordinary files, names, sizes and contents.
smb shadow "get bin/big $work/big" >"$work/out" || { cat "$work/out"; fail "get"; }
cmp "$share/data/bin/big" "$work/big" || fail "a file read through Samba differs"
head -c 5000000 /dev/urandom >"$work/upload"
smb shadow "mkdir up; put $work/upload up/file; rename up/file up/moved" >"$work/out" || { cat "$work/out"; fail "put"; }
cmp "$work/upload" "$share/data/up/moved" || fail "a file written through Samba differs"
smb shadow "setmode up/moved +rh" >"$work/out" || { cat "$work/out"; fail "setmode"; }
smb shadow "allinfo up/moved" | grep -q 'attributes:.*RH' || fail "DOS attributes in extended attributes"
say "Samba reads and writes the mount"

# Previous versions.
smb shadow "allinfo report" >"$work/out"
expect "@GMT-2026.03.02-12.00.00 @GMT-2026.03.01-12.00.00" "$(grep -o '^@GMT[^ ]*' "$work/out" | paste -sd' ')" "previous versions of a file"
for pair in 01:first 02:second; do
  smb shadow "get @GMT-2026.03.${pair%:*}-12.00.00/report $work/old" >"$work/out" || { cat "$work/out"; fail "get of a previous version"; }
  expect "${pair#*:}" "$(cat "$work/old")" "content of a previous version"
done
smb shadow "get @GMT-2026.03.01-12.00.00/docs/2.txt $work/old" >"$work/out" || fail "get of a removed file from a previous version"
seq 2 1400 | cmp - "$work/old" || fail "content of a removed file"
! smb shadow "put $work/upload @GMT-2026.03.01-12.00.00/new" >/dev/null || fail "a previous version was written"
say "previous versions are listed and read"

# The module btrfs copies inside of the server.
smb btrfs "scopy bin/big bin/server-copy" >"$work/out" || { cat "$work/out"; fail "server-side copy with the module btrfs"; }
cmp "$share/data/bin/big" "$share/data/bin/server-copy" || fail "a server-side copy differs"
smb shadow "scopy bin/big bin/server-copy2" >"$work/out" || { cat "$work/out"; fail "server-side copy"; }
cmp "$share/data/bin/big" "$share/data/bin/server-copy2" || fail "a server-side copy differs"
say "copies on the server"
kill "$server"
wait "$server" 2>/dev/null || true
ubtrfs umount "$share"
check_image "$work/share.img"
