# Common parts of the tests with other programs. Each test sources this file. scripts/tools/run runs the tests.
# SPDX-License-Identifier: MIT OR Apache-2.0
#
#   sh NAME.sh PROGRAMS SCRATCH
#
# PROGRAMS is a folder with ubtrfs and its names of btrfs-progs.
# SCRATCH is a folder in which the test may write.
# The status is 0 for a pass, 77 if the test cannot run here, and 1 for a failure.

[ $# -eq 2 ] || { echo "usage: sh $0 PROGRAMS SCRATCH" >&2; exit 2; }
programs=$(cd "$1" && pwd)
mkdir -p "$2"
work=$(mktemp -d "$(cd "$2" && pwd)/$(basename "$0" .sh).XXXXXX")
system_path=$PATH:/usr/local/sbin:/usr/sbin:/sbin
PATH=$programs:$system_path
export PATH
# Programs translate their messages and sort by the locale.
LC_ALL=C
TZ=UTC
export LC_ALL TZ
# libblkid believes a cache for seconds. Other programs on this machine may reuse the same loop devices.
BLKID_FILE=$work/blkid.tab
export BLKID_FILE
umask 022

say() { echo "$*"; }
skip() { echo "skipped: $*"; exit 77; }
fail() { echo "FAILED: $*" >&2; exit 1; }
# Notes a failure, and lets the test continue. The test fails at its end.
failures=0
note() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }

# Unmounts everything below the work folder, the newest mount first, and removes the folder.
# A test can define at_end to stop its own processes.
finish() {
  status=$?
  trap - EXIT
  [ $status -ne 0 ] || [ "$failures" -eq 0 ] || status=1
  set +e
  ! command -v at_end >/dev/null || at_end
  for point in $(awk -v under="$work/" 'index($5, under) == 1 { print $5 }' /proc/self/mountinfo | sort -r); do
    umount "$point" 2>/dev/null || umount -l "$point" 2>/dev/null
  done
  for image in "$work"/*.img; do
    [ -e "$image" ] || continue
    # The image stays locked until its server has written the last commit.
    timeout 20 flock -x "$image" true 2>/dev/null
    for loop in $(losetup -n -O NAME -j "$image" 2>/dev/null); do losetup -d "$loop"; done
  done
  if [ -n "${KEEP:-}" ]; then echo "kept $work"; else rm -rf --one-file-system "$work"; fi
  [ $status -ne 0 ] || echo "passed"
  exit $status
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

# Skips the test unless all these programs exist.
need() {
  for program in "$@"; do
    command -v "$program" >/dev/null || skip "the program $program is missing"
  done
}
need_root() { [ "$(id -u)" -eq 0 ] || skip "this test needs root"; }
need_fuse() { [ -c /dev/fuse ] || skip "/dev/fuse is missing"; }
# Loop devices need a kernel with them, and the right to attach one.
need_loop() {
  truncate -s 1M "$work/probe"
  probe=$(losetup -f --show "$work/probe" 2>/dev/null) || skip "loop devices cannot be used here"
  losetup -d "$probe"
}

# Runs the test again in new namespaces: these options are for unshare. The mounts of other programs are detached in the
# new mount namespace, which would keep them in use.
in_namespace() { # OPTIONS ARGUMENTS...
  if [ "${PRIVATE:-}" = yes ]; then
    awk -v work="$work/" '/ - (fuse\.ubtrfs|btrfs \/dev\/loop[0-9]+) / && index($5, work) != 1 && index(work, $5 "/") != 1 { print $5 }' \
      /proc/self/mountinfo | while read -r point; do
      umount -i -l "$point" 2>/dev/null || true
    done
    return 0
  fi
  kinds=$1
  shift
  rm -rf "$work"
  trap - EXIT
  exec env PRIVATE=yes unshare "$kinds" --propagation private sh "$0" "$@"
}

# Runs a command of the real btrfs-progs, if it is installed. Without it, the status is 78.
real() {
  name=$1
  shift
  found=$(PATH=$system_path command -v "$name") || return 78
  case $(basename "$(readlink -f "$found")") in ubtrfs) return 78 ;; esac
  PATH=$system_path "$found" "$@"
}
has_real() { real btrfs --version >/dev/null 2>&1; }

# True if this kernel mounts btrfs.
linux_btrfs() { [ "$(id -u)" -eq 0 ] && grep -qw btrfs /proc/filesystems; }
# Mounts an image with Linux's btrfs, without the helper mount.btrfs of ubtrfs.
linux_mount() { # IMAGE DIR [OPTIONS]
  mkdir -p "$2"
  mount -i -t btrfs -o "loop,${3:-ro}" "$1" "$2"
}

# Checks an unmounted image with ubtrfs, and with btrfs-progs if it is installed.
check_image() {
  ubtrfs check --check-data-csum "$1" >"$work/check.out" 2>&1 || { cat "$work/check.out"; fail "ubtrfs check of $(basename "$1")"; }
  if has_real; then
    real btrfs check --check-data-csum "$1" >"$work/check.out" 2>&1 || { cat "$work/check.out"; fail "btrfs check of $(basename "$1")"; }
  fi
}

# Prints a description of a tree: names, types, modes, owners, sizes, times, links, contents and attributes.
describe() {
  (cd "$1" && {
    # The size of a directory and the link count of one are not content.
    find . -mindepth 1 -type d -printf 'd %P %m %U %G %T@\n'
    find . -mindepth 1 ! -type d -printf '%y %P %m %U %G %s %T@ %n %l\n'
    find . -type f -exec sha256sum {} +
    if command -v getfattr >/dev/null; then
      find . -exec getfattr -h -d -m 'user|security.capability|posix_acl' -e hex {} + 2>/dev/null | awk '/^# file:/ { name = $0; next } NF { print name, $0 }'
    fi
  }) | sort
}

# Fails unless two descriptions or lists are equal.
same() { # FILE FILE WHAT
  cmp -s "$1" "$2" || { diff "$1" "$2" | head -n 20; fail "$3 differ"; }
}
same_trees() { # DIR DIR
  describe "$1" >"$work/left"
  describe "$2" >"$work/right"
  [ -s "$work/left" ] || fail "$1 is empty"
  same "$work/left" "$work/right" "the trees $1 and $2"
}
# Fails unless the text of a command's output is the given one.
expect() { # WANTED GOT WHAT
  [ "$1" = "$2" ] || { echo "wanted: $1"; echo "got:    $2"; fail "$3"; }
}

# Makes an image and mounts it.
make_mount() { # NAME SIZE [MKFS OPTIONS]
  made=$1
  size=$2
  shift 2
  mkfs.btrfs -q -b "$size" "$@" "$work/$made.img" >/dev/null
  mkdir -p "$work/$made"
  ubtrfs mount "$work/$made.img" "$work/$made"
}

# Makes a tree with all kinds of files that an ordinary backup has to keep.
make_tree() { # DIR
  (cd "$1"
    mkdir -p docs/deep/er empty bin
    for i in 1 2 3 4 5 6 7 8; do seq "$i" "$((i * 700))" >"docs/$i.txt"; done
    head -c 3000000 /dev/urandom >bin/big
    cp bin/big bin/copy
    truncate -s 5M docs/sparse
    echo middle | dd of=docs/sparse bs=1 seek=3000000 conv=notrunc 2>/dev/null
    ln docs/1.txt docs/deep/hard
    ln -s ../docs/2.txt bin/link
    ln -s /nowhere/at/all bin/dangling
    mkfifo docs/pipe
    : >docs/deep/er/nothing
    printf 'x' >"docs/a name with spaces"
    printf 'y' >docs/naïve
    chmod 640 docs/3.txt
    chmod 4755 docs/4.txt
    chmod 1777 empty
    touch -d '2001-02-03 04:05:06.789' docs/5.txt
    ! command -v setfattr >/dev/null || setfattr -n user.colour -v blue docs/6.txt
    ! command -v setfacl >/dev/null || setfacl -m u:12345:rw docs/7.txt
    [ "$(id -u)" -ne 0 ] || chown 1234:4321 docs/8.txt)
}
