#!/bin/sh
# NFS-Ganesha exports a mount over NFS 3 and 4, in a network namespace of its own. libnfs is the client.
# The server restarts, and the filesystem is mounted again: file handles stay valid.
# Needs root and FUSE (Debian: nfs-ganesha nfs-ganesha-vfs libnfs-utils rpcbind dbus iproute2).
# SPDX-License-Identifier: MIT OR Apache-2.0
set -eu
. "$(dirname "$0")/lib.sh"
need_root
need_fuse
need ganesha.nfsd nfs-ls nfs-cp nfs-cat rpcbind dbus-daemon ip unshare
unshare -n true 2>/dev/null || skip "network namespaces cannot be made here"
in_namespace -nm "$@"
ip link set lo up
# The servers keep their state below /run and /var/lib. In this namespace, both are empty.
mount -t tmpfs tmpfs /run
mkdir -p /run/rpcbind /run/ganesha /run/dbus "$work/state" "$work/state/lib"
mkdir -p /var/lib/nfs && mount -t tmpfs tmpfs /var/lib/nfs
started=
at_end() {
  for pid in $started; do kill "$pid" 2>/dev/null; done
  for pid in $started; do wait "$pid" 2>/dev/null; done
}
dbus-daemon --system --nofork --nopidfile >"$work/dbus.log" 2>&1 &
started=$!
rpcbind -w -f >"$work/rpcbind.log" 2>&1 &
started="$started $!"

make_mount export 512M
dir=$work/export
btrfs subvolume create "$dir/sub" >/dev/null
make_tree "$dir/sub"
btrfs subvolume snapshot -r "$dir/sub" "$dir/snap" >/dev/null
cat >"$work/conf" <<EOF
NFS_CORE_PARAM { Protocols = 3,4; NFS_Port = 20491; MNT_Port = 20492; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 { RecoveryBackend = fs; Graceless = true; RecoveryRoot = $work/state; }
EXPORT { Export_Id = 7; Path = $dir; Pseudo = /x; Access_Type = RW; Squash = None; SecType = sys; Filesystem_id = 7.7; FSAL { Name = VFS; } }
EOF
serve() {
  ganesha.nfsd -F -f "$work/conf" -L "$work/ganesha.log" -p "$work/ganesha.pid" -N NIV_EVENT >"$work/ganesha.out" 2>&1 &
  ganesha=$!
  started="$started $ganesha"
  tries=0
  until nfs-ls "nfs://127.0.0.1$dir?$three" >"$work/out" 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] && kill -0 $ganesha 2>/dev/null || { cat "$work/out" "$work/ganesha.log"; fail "the NFS server does not answer"; }
    sleep 0.1
  done
}
three="nfsport=20491&mountport=20492"
four="version=4&nfsport=20491"
serve
expect "snap sub" "$(awk '{ print $NF }' "$work/out" | sort | paste -sd' ')" "list of the export"
nfs-cp "nfs://127.0.0.1$dir/sub/bin/big?$three" "$work/big" >/dev/null || fail "read over NFS 3"
cmp "$work/big" "$dir/sub/bin/big" || fail "a file read over NFS 3 differs"
nfs-cp "$work/big" "nfs://127.0.0.1$dir/sub/uploaded?$three" >/dev/null || fail "write over NFS 3"
cmp "$work/big" "$dir/sub/uploaded" || fail "a file written over NFS 3 differs"
expect x "$(nfs-cat "nfs://127.0.0.1$dir/snap/docs/a name with spaces?$three")" "a file of a snapshot over NFS 3"
! nfs-cp "$work/big" "nfs://127.0.0.1$dir/snap/new?$three" >/dev/null 2>&1 || fail "a read-only snapshot was written over NFS"
nfs-cat "nfs://127.0.0.1/x/sub/docs/5.txt?$four" >"$work/five" || fail "read over NFS 4"
cmp "$work/five" "$dir/sub/docs/5.txt" || fail "a file read over NFS 4 differs"
say "files of a subvolume and of a snapshot over NFS 3 and 4"

# After a restart of everything, clients go on with the handles that they have.
handles() {
  command -v python3 >/dev/null || return 0
  python3 - "$@" <<'EOF'
import ctypes, os, pickle, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
what, store, top, *names = sys.argv[1:]
if what == "keep":
    kept = []
    for name in names:
        handle, mount = Handle(128), ctypes.c_int()
        if libc.name_to_handle_at(-100, os.path.join(top, name).encode(), ctypes.byref(handle), ctypes.byref(mount), 0):
            sys.exit("no handle of " + name)
        kept.append((name, handle.size, handle.type, bytes(handle.data)))
    pickle.dump(kept, open(store, "wb"))
else:
    base = os.open(top, os.O_RDONLY)
    for name, size, kind, data in pickle.load(open(store, "rb")):
        handle = Handle(size, kind, (ctypes.c_ubyte * 128)(*data))
        file = libc.open_by_handle_at(base, ctypes.byref(handle), os.O_RDONLY)
        if file < 0:
            sys.exit("%s: %s" % (name, os.strerror(ctypes.get_errno())))
        if os.fstat(file).st_ino != os.stat(os.path.join(top, name)).st_ino:
            sys.exit(name + ": another file")
        os.close(file)
EOF
}
handles keep "$work/handles" "$dir" sub/bin/big snap/docs/1.txt sub snap sub/docs || fail "file handles"
kill $ganesha
wait $ganesha 2>/dev/null || true
ubtrfs umount "$dir"
ubtrfs mount "$work/export.img" "$dir"
handles use "$work/handles" "$dir" || fail "file handles after a remount"
serve
nfs-cp "nfs://127.0.0.1$dir/sub/uploaded?$three" "$work/again" >/dev/null || fail "read after the restart"
cmp "$work/big" "$work/again" || fail "a file after the restart differs"
kill $ganesha
wait $ganesha 2>/dev/null || true
say "restart of the server, and file handles after a remount"
ubtrfs umount "$dir"
check_image "$work/export.img"
