//! Tests that `receive` finds the parents of incremental streams as btrfs-progs does, but refuses parents that have
//! become writable since they were received.

use std::ffi::OsStr;
use std::fs;
use std::process::Output;

use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run as sh, second_opinion};

use crate::common::{ok, refused, text, ubtrfs};

/// Streams of snapshot `A` and, as an increment to it, of snapshot `B`: sent from the filesystem that made them
/// (`A.st`, `B.st`), and from a filesystem that received them (`A2.st`, `B2.st`).
struct Relay {
    dir: TempDir,
}

impl Relay {
    fn new() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-relay-").unwrap();
        let (one, two) = (Image::kernel_made(512 << 20, &[]).unwrap(), Image::kernel_made(512 << 20, &[]).unwrap());
        let (one, two) = (LoopMount::new(one.path(), "").unwrap(), LoopMount::new(two.path(), "").unwrap());
        let script = "
            for i in 1 2 3 4 5; do touch $2/$i; sync -f $2; done
            cd $3; btrfs -q subvolume create $1/v; head -c 300000 /dev/urandom > $1/v/f
            btrfs -q subvolume snapshot -r $1/v $1/A; echo two >> $1/v/f; btrfs -q subvolume snapshot -r $1/v $1/B
            btrfs -q send $1/A -f A.st; btrfs -q receive -f A.st $2
            btrfs -q send -p $1/A $1/B -f B.st; btrfs -q receive -f B.st $2
            btrfs -q send $2/A -f A2.st; btrfs -q send -p $2/A $2/B -f B2.st; sha256sum < $1/B/f > sum";
        let words = [OsStr::new("-ec"), OsStr::new(script), OsStr::new("relay"), one.path().as_os_str()];
        sh("bash", words.into_iter().chain([two.path().as_os_str(), dir.path().as_os_str()])).unwrap();
        one.close().unwrap();
        two.close().unwrap();
        Self { dir }
    }

    fn stream(&self, name: &str) -> String {
        text(&self.dir.path().join(name))
    }

    fn sum(&self) -> String {
        fs::read_to_string(self.dir.path().join("sum")).unwrap()
    }
}

fn receive(stream: &str, place: &str) -> Output {
    ubtrfs(["receive", "-q", "-f", stream, place])
}

#[test]
fn a_parent_is_found_whoever_sent_it() {
    if !capability::kernel_oracle() {
        return;
    }
    let relay = Relay::new();
    for (full, incremental) in [("A.st", "B.st"), ("A.st", "B2.st"), ("A2.st", "B.st"), ("A2.st", "B2.st")] {
        let image = Image::kernel_made(512 << 20, &[]).unwrap();
        let place = text(image.path());
        ok(receive(&relay.stream(full), &place));
        ok(receive(&relay.stream(incremental), &place));
        let linux = LoopMount::new(image.path(), "ro").unwrap();
        let file = text(&linux.path().join("B/f"));
        assert_eq!(sh("bash", ["-c", &format!("sha256sum < {file}")]).unwrap(), relay.sum(), "{full} {incremental}");
        linux.close().unwrap();
        btrfs_check(image.path()).unwrap();
    }
}

#[test]
fn a_writable_subvolume_is_no_parent_and_loses_its_received_uuid() {
    if !capability::kernel_oracle() {
        return;
    }
    let relay = Relay::new();
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let place = text(image.path());
    ok(receive(&relay.stream("A.st"), &place));
    let at = format!("{place}:/A");
    let writable = ["subvolume", "set-read-only", &at, "false"];
    refused(&ubtrfs(writable), &["it was received", "snapshot", "-f"]);
    refused(&ubtrfs(["property", "set", &at, "ro", "false"]), &["it was received"]);
    assert!(!ok(ubtrfs(["subvolume", "show", &at])).contains("Received UUID: \t\t-"));
    ok(ubtrfs(["property", "set", "-f", &at, "ro", "false"]));
    ok(ubtrfs(["property", "set", &at, "ro", "true"]));
    refused(&receive(&relay.stream("B.st"), &place), &["the parent subvolume is not here"]);
    second_opinion(image.path()).unwrap();
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let shown = sh("btrfs", ["subvolume", "show", &text(&linux.path().join("A"))]).unwrap();
    assert!(
        shown.lines().any(|line| line.trim().starts_with("Received UUID:") && line.trim().ends_with('-')),
        "{shown}"
    );
    linux.close().unwrap();
}

#[test]
fn more_subvolumes_of_one_received_uuid_than_an_item_holds_do_no_harm() {
    /// The number of subvolume ids that fit into the largest UUID item of a leaf of 4 KiB.
    const FITTING: usize = (4096 - 101 - 25) / 8;
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let relay = Relay::new();
    let image = Image::kernel_made(512 << 20, &["-n", "4096"]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-many-").unwrap();
    ok(ubtrfs(["mount", &text(image.path()), &text(dir.path())]));
    let at = |name: &str| text(&dir.path().join(name));
    ok(receive(&relay.stream("A.st"), &at("")));
    fs::create_dir(at("s")).unwrap();
    for number in 0..FITTING + 4 {
        ok_quiet(&ubtrfs(["subvolume", "snapshot", "-r", &at("A"), &at(&format!("s/{number}"))]));
    }
    fs::write(at("still-writable"), b"yes").unwrap();
    fs::create_dir(at("again")).unwrap();
    refused(&receive(&relay.stream("A.st"), &at("again")), &["too many subvolumes"]);
    fs::write(at("still-writable"), b"and still").unwrap();
    ok(ubtrfs(["umount", &at("")]));
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    assert_eq!(fs::read(linux.path().join("still-writable")).unwrap(), b"and still");
    linux.close().unwrap();
}

#[track_caller]
fn ok_quiet(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn nothing_is_received_where_the_kernel_keeps_sizes() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let relay = Relay::new();
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-sizes-").unwrap();
    ok(ubtrfs(["mount", "-o", "writeback_cache", &text(image.path()), &text(dir.path())]));
    let refusal = receive(&relay.stream("A.st"), &text(dir.path()));
    ok(ubtrfs(["umount", &text(dir.path())]));
    refused(&refusal, &["writeback_cache", "unmounted image"]);
}
