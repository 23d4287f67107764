//! Tests that permissions on subvolumes, renames of subvolumes, and open files after deletion behave as on Linux.
//!
//! Method: a program (`programs/subvolumes.py`) makes equal calls by root and two users on our mount and on Linux's,
//! and prints each result; the outputs must be equal. The program first makes the calls that test each rule, and then
//! random calls. `btrfs check` and Linux find our mount's image undamaged.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability, run, second_opinion};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/programs/subvolumes.py");

fn ready() -> bool {
    capability::fuse()
        && capability::kernel_oracle()
        && ["python3", "chattr", "setfacl"].iter().all(|name| capability::program(name))
}

fn call(dir: &Path, words: &[&str]) -> String {
    let words = words.iter().map(OsStr::new);
    let args = ["-k", "5", "300", "python3", PROGRAM].map(OsStr::new).into_iter().chain([dir.as_os_str()]).chain(words);
    run("timeout", args).unwrap()
}

/// Runs the program on both mounts with these mount options and arguments. Returns both outputs.
fn on_both(options: &str, words: &[&str]) -> (String, String) {
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-rules-").unwrap();
    let option = format!("-ocommit=5,{options}");
    run(UBTRFS, [OsStr::new("mount"), OsStr::new(&option), image.path().as_os_str(), dir.path().as_os_str()]).unwrap();
    let mounted = Mounted(dir.path());
    let ours = call(dir.path(), words);
    drop(mounted);
    second_opinion(image.path()).unwrap();
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    linux.scrub().unwrap();
    linux.close().unwrap();
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let linux = LoopMount::new(image.path(), options).unwrap();
    let theirs = call(linux.path(), words);
    linux.close().unwrap();
    (ours, theirs)
}

/// A mount, unmounted on drop, also if the test panics.
struct Mounted<'d>(&'d Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let unmount = |lazy: &[&str]| Command::new(UBTRFS).arg("umount").args(lazy).arg(self.0).status().unwrap();
        if !unmount(&[]).success() {
            unmount(&["-l"]);
            assert!(std::thread::panicking(), "the mount is still in use");
        }
    }
}

#[track_caller]
fn compare((ours, theirs): &(String, String), from: &str) {
    let lines = ours.lines().zip(theirs.lines()).enumerate();
    let differ: Vec<String> = lines
        .filter(|(_, (ours, theirs))| ours != theirs)
        .map(|(number, (ours, theirs))| format!("{number}: {ours}\n  Linux: {theirs}"))
        .take(10)
        .collect();
    assert!(differ.is_empty(), "{from}:\n{}", differ.join("\n"));
    assert_eq!(ours.lines().count(), theirs.lines().count(), "{from}");
}

#[test]
fn subvolumes_follow_linuxs_rules() {
    if !ready() {
        return;
    }
    let both = on_both("", &["rules"]);
    assert!(both.1.lines().count() > 250, "{}", both.1);
    compare(&both, "without options");
}

#[test]
fn users_delete_subvolumes_where_they_are_allowed_to_as_on_linux() {
    if !ready() {
        return;
    }
    compare(&on_both("user_subvol_rm_allowed", &["rules"]), "user_subvol_rm_allowed");
}

#[test]
fn random_calls_of_several_users_end_as_on_linux() {
    if !ready() {
        return;
    }
    let seed = Rng::seed_or(20261123);
    for (round, options) in ["", "user_subvol_rm_allowed"].iter().enumerate() {
        let seed = (seed + round as u64).to_string();
        compare(&on_both(options, &["random", &seed, "1500"]), &format!("UBTRFS_SEED={seed} {options}"));
    }
}
