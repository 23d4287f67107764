//! Tests that btrfs's ioctls on a mount answer as on Linux.
//!
//! Method: a program (`programs/ioctls.py`) makes calls as root and as a user, and prints each result. The program runs
//! in our mount of an image and in Linux's mount of a copy, and the outputs must be equal.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability, run};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/programs/ioctls.py");

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle() && capability::program("python3")
}

/// Makes an image with directories, files and subvolumes, some of them nested.
fn image() -> Image {
    let image = Image::kernel_made(1 << 30, &["-L", "a label"]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let at = |path: &str| linux.path().join(path);
    fs::set_permissions(linux.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(at("dir/in/deep")).unwrap();
    fs::write(at("dir/file"), b"content").unwrap();
    for path in ["a", "dir/in/b", "dir/in/deep/c", "a/d"] {
        run("btrfs", [OsStr::new("subvolume"), OsStr::new("create"), at(path).as_os_str()]).unwrap();
    }
    fs::write(at("a/x"), b"data").unwrap();
    fs::create_dir(at("a/y")).unwrap();
    linux.close().unwrap();
    image
}

/// Runs the program on our mount of the image and on Linux's mount of a copy. Returns our output and
/// Linux's.
fn on_both(image: &Image, options: &[&str], word: &str) -> (String, String) {
    let call = |dir: &Path| {
        let words = ["-k", "5", "300", "python3", PROGRAM].map(OsStr::new);
        run("timeout", words.into_iter().chain([dir.as_os_str(), OsStr::new(word)])).unwrap()
    };
    let copy = Image::copy_of(image.path()).unwrap();
    let linux = LoopMount::new(copy.path(), "").unwrap();
    let theirs = call(linux.path());
    linux.close().unwrap();
    let dir = TempDir::with_prefix("ubtrfs-ioctls-").unwrap();
    let paths = [image.path().as_os_str(), dir.path().as_os_str()];
    run(UBTRFS, ["mount", "-oallow_other"].iter().chain(options).map(OsStr::new).chain(paths)).unwrap();
    let called = std::panic::catch_unwind(|| call(dir.path()));
    let unmounted = Command::new(UBTRFS).arg("umount").arg(dir.path()).status().unwrap();
    let ours = called.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert!(unmounted.success());
    btrfs_check(image.path()).unwrap();
    (ours, theirs)
}

#[track_caller]
fn compare((ours, theirs): &(String, String)) {
    let differ: Vec<String> = ours
        .lines()
        .zip(theirs.lines())
        .filter(|(ours, theirs)| ours != theirs)
        .map(|(ours, theirs)| format!("{ours}\n  Linux: {theirs}"))
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    assert_eq!(ours.lines().count(), theirs.lines().count());
}

#[test]
fn reading_ioctls_answer_as_on_linux() {
    if !ready() {
        return;
    }
    let both = on_both(&image(), &[], "look");
    assert!(both.1.lines().count() > 80, "{}", both.1);
    compare(&both);
}

#[test]
fn balance_quota_and_trim_ioctls_act_as_on_linux() {
    if !ready() {
        return;
    }
    let both = on_both(&image(), &[], "admin");
    assert!(both.1.lines().count() > 60, "{}", both.1);
    compare(&both);
}

#[test]
fn new_subvolumes_join_the_quota_groups_behind_a_pointer() {
    if !ready() {
        return;
    }
    let both = on_both(&image(), &[], "inherit");
    assert!(both.1.lines().count() > 14, "{}", both.1);
    compare(&both);
}

#[test]
fn subvolumes_are_marked_as_received_and_counters_read_as_on_linux() {
    if !ready() {
        return;
    }
    let both = on_both(&image(), &[], "received");
    assert!(both.1.lines().count() > 60, "{}", both.1);
    compare(&both);
}

#[test]
fn random_arguments_harm_nothing() {
    if !ready() {
        return;
    }
    let image = image();
    let dir = TempDir::with_prefix("ubtrfs-ioctls-").unwrap();
    run(UBTRFS, [OsStr::new("mount"), image.path().as_os_str(), dir.path().as_os_str()]).unwrap();
    let seed = Rng::seed_or(20_261_123).to_string();
    let words = ["-k", "5", "300", "python3", PROGRAM].map(OsStr::new);
    let called = Command::new("timeout").args(words).arg(dir.path()).args(["garbage", &seed]).output().unwrap();
    let unmounted = Command::new(UBTRFS).arg("umount").arg(dir.path()).status().unwrap();
    assert_eq!(String::from_utf8_lossy(&called.stdout), "garbage\n", "UBTRFS_SEED={seed}: {called:?}");
    assert!(unmounted.success());
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_descriptor_of_the_caller_names_the_source_of_a_snapshot() {
    if !ready() {
        return;
    }
    for options in [&[][..], &["--sandbox"]] {
        compare(&on_both(&image(), options, "snapshot"));
    }
}

/// Before a snapshot, Linux writes back what programs stored in memory maps of the source's files.
#[test]
fn a_snapshot_by_ioctl_has_what_programs_stored_in_maps() {
    if !ready() {
        return;
    }
    const STORE: &str = r#"
import fcntl, mmap, os, struct, sys
base, number = sys.argv[1], 0
def snapshot(source, target, name):
    s, d = os.open(source, os.O_RDONLY), os.open(target, os.O_RDONLY)
    args = bytearray(struct.pack("qQQ32x", s, 0, 0) + name.encode().ljust(4040, b"\0"))
    fcntl.ioctl(d, 0x50009417, args)
    os.close(s)
    os.close(d)
for target in ("", "dir", "a"):
    for how in ("write", "map"):
        files = []
        for part in range(3):
            fd = os.open(f"{base}/a/file{part}", os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(fd, 40000)
            number += 1
            tag = f"content {number}".encode().ljust(20000, b".")
            if how == "write":
                os.pwrite(fd, tag, 100)
            else:
                mmap.mmap(fd, 40000)[100:20100] = tag
            files.append((fd, part, tag))
        name = f"snapshot-{how}-{number}"
        snapshot(f"{base}/a", f"{base}/{target}", name)
        for fd, part, tag in files:
            with open(f"{base}/{target}/{name}/file{part}", "rb") as copy:
                assert copy.read()[100:20100] == tag, f"{how} {part} in {target}"
            os.close(fd)
"#;
    for options in ["allow_other", "writeback_cache"] {
        let image = image();
        let dir = TempDir::with_prefix("ubtrfs-ioctls-").unwrap();
        let at = dir.path().to_str().unwrap();
        run(UBTRFS, ["mount", "-o", options, image.path().to_str().unwrap(), at]).unwrap();
        let stored = Command::new("timeout").args(["-k", "5", "100", "python3", "-c", STORE, at]).output().unwrap();
        run(UBTRFS, ["umount", at]).unwrap();
        assert!(stored.status.success(), "{options}: {}", String::from_utf8_lossy(&stored.stderr));
        btrfs_check(image.path()).unwrap();
    }
}
