//! Tests of directories that are nested many thousands deep: commands take time and memory that grow with the depth, not
//! with its square.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};
use ubtrfs_device::{Access, FileDevice};
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode};
use ubtrfs_testkit::{Image, btrfs_check, capability};

use crate::common::{ok, text, ubtrfs};

const ROOT: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };

fn open(image: &Path) -> Arc<Fs> {
    let device = FileDevice::open(image, Access::ReadWrite).unwrap();
    Fs::open(vec![Arc::new(device)], MountOptions::default()).unwrap()
}

/// Makes the directory `/top`, and in it a chain of directories with this name. The innermost one has mode 0751.
fn make_chain(image: &Path, name: &[u8], depth: usize) {
    let fs = open(image);
    let mut at = fs.create(fs.root(), b"top", NewInode::dir(0o755), &ROOT).unwrap().id;
    for level in 1..=depth {
        at = fs.create(at, name, NewInode::dir(if level == depth { 0o751 } else { 0o755 }), &ROOT).unwrap().id;
    }
    fs.close().unwrap();
}

/// The depth of a chain in an image, and the mode of its innermost directory.
fn chain_in(image: &Path, top: &[u8]) -> (usize, u32) {
    let fs = open(image);
    let mut at: InodeId = fs.lookup(fs.root(), top).unwrap().id;
    let mut depth = 0;
    while let Ok(found) = fs.lookup(at, b"d") {
        at = found.id;
        depth += 1;
    }
    let mode = fs.getattr(at).unwrap().mode;
    fs.close().unwrap();
    (depth, mode & 0o7777)
}

/// Returns the depth of a chain of directories on the host, and the mode of its innermost directory.
fn chain_on_host(top: &Path) -> (usize, u32) {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let mut at: OwnedFd = openat(CWD, top, flags, Mode::empty()).unwrap();
    let mut depth = 0;
    while let Ok(next) = openat(&at, "d", flags, Mode::empty()) {
        at = next;
        depth += 1;
    }
    (depth, rustix::fs::fstat(&at).unwrap().st_mode & 0o7777)
}

#[test]
fn a_deep_chain_is_copied_and_counted() {
    if !capability::kernel_oracle() {
        return;
    }
    const DEPTH: usize = 10_000;
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    make_chain(image.path(), b"d", DEPTH);
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("copy");
    let path = text(image.path());
    ok(ubtrfs(["cp", "-r", &format!("{path}:/top"), &text(&target)]));
    assert_eq!(chain_on_host(&target), (DEPTH, 0o751));
    // remove_dir_all would need a descriptor for each level.
    assert!(Command::new("rm").arg("-rf").arg(&target).status().unwrap().success());
    ok(ubtrfs(["cp", "-a", &format!("{path}:/top"), &format!("{path}:/again")]));
    assert_eq!(chain_in(image.path(), b"again"), (DEPTH, 0o751));
    assert!(ok(ubtrfs(["filesystem", "du", "-s", &format!("{path}:/")])).contains("0.00B"));
    ok(ubtrfs(["chmod", "-R", "o-x", &format!("{path}:/again")]));
    assert_eq!(chain_in(image.path(), b"again"), (DEPTH, 0o750));
    assert_eq!(ok(ubtrfs(["find", &format!("{path}:/again"), "--mindepth", &DEPTH.to_string()])).lines().count(), 1);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_list_of_long_paths_is_not_limited_by_the_size_of_an_answer() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    const DEPTH: usize = 1000;
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    // The paths have 125 MB together. An answer of the mount's server has at most 64 MiB.
    make_chain(image.path(), &[b'd'; 250], DEPTH);
    let dir = tempfile::tempdir().unwrap();
    ok(ubtrfs(["mount", &text(image.path()), &text(dir.path())]));
    let list = ok(ubtrfs(["filesystem", "du", &text(dir.path())]));
    ok(ubtrfs(["umount", &text(dir.path())]));
    let deepest = list.lines().nth(1).unwrap();
    assert_eq!(list.lines().count(), DEPTH + 3);
    assert_eq!(deepest.matches('/').count(), text(dir.path()).matches('/').count() + 1 + DEPTH);
    btrfs_check(image.path()).unwrap();
}
