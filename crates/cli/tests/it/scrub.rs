//! Tests `scrub` on images and mounts: what it finds is what Linux finds, what it repairs satisfies Linux, and an
//! interrupted scrub goes on.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run};

use crate::common::{ok, refused, server_of, text, ubtrfs};

const MIB: usize = 1 << 20;

/// A mount that is unmounted at the end.
struct Mounted(PathBuf);

impl Mounted {
    fn new(image: &Path, dir: &Path) -> Self {
        fs::create_dir_all(dir).unwrap();
        ok(ubtrfs(["mount", &text(image), &text(dir)]));
        Self(dir.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = ubtrfs(["umount", &text(&self.0)]);
    }
}

/// This program by the name `btrfs`.
fn as_btrfs(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.arg0("btrfs").args(args).env("LC_ALL", "C").env("TZ", "UTC").output().unwrap()
}

/// The text without what differs in every run.
fn normal(text: &str) -> String {
    let varies = ["Scrub started:", "Duration:", "Total to scrub:", "Rate:"];
    text.lines().filter(|line| !varies.iter().any(|start| line.starts_with(start))).collect::<Vec<_>>().join("\n")
}

/// An image that Linux made, with a file of 8 MiB. `damage` sectors of the file's data are bad, and one copy of the block
/// at the root of the subvolume.
fn damaged(damage: usize) -> Image {
    let image = Image::kernel_made(512 << 20, &["-m", "dup", "-d", "single"]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let content: Vec<u8> = (0..8 * MIB).map(|at| (at / 4096 + at % 251) as u8).collect();
    fs::write(linux.join("file"), content).unwrap();
    fs::create_dir(linux.join("dir")).unwrap();
    fs::write(linux.join("dir/small"), "small").unwrap();
    linux.close().unwrap();
    let tree = run("btrfs", ["inspect-internal", "dump-tree", "-t", "fs", &text(image.path())]).unwrap();
    let of_data = tree.lines().find(|line| line.contains("extent data disk byte")).unwrap();
    let bytenr = of_data.split_whitespace().nth(4).unwrap();
    let of_root = tree.lines().find(|line| line.starts_with("leaf ")).unwrap().split_whitespace().nth(1).unwrap();
    let device = fs::File::options().write(true).open(image.path()).unwrap();
    let place = |bytenr: &str| -> u64 {
        let found = run("btrfs-map-logical", ["-l", bytenr, &text(image.path())]).unwrap();
        found.split_whitespace().nth(5).unwrap().parse().unwrap()
    };
    for sector in 0..damage as u64 {
        device.write_all_at(&[0xaa; 4096], place(bytenr) + (3 + sector) * 4096).unwrap();
    }
    device.write_all_at(&[0xaa; 4096], place(of_root) + 4096).unwrap();
    image
}

#[test]
fn what_is_found_is_what_linux_finds() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Both programs scrub equal images without repairs, and print the same.
    let image = damaged(3);
    let copy = dir.path().join("copy");
    run("cp", ["--sparse=always", &text(image.path()), &text(&copy)]).unwrap();
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let theirs = Command::new("btrfs").args(["scrub", "start", "-Br", &text(&linux.join(""))]).output().unwrap();
    linux.close().unwrap();
    let ours = as_btrfs(&["scrub", "start", "-Br", &text(&copy)]);
    let told = |output: &Output| normal(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(told(&ours), told(&theirs));
    assert!(told(&ours).contains("verify=4 csum=3") && told(&ours).contains("Uncorrectable:  3"), "{}", told(&ours));
    assert_eq!((ours.status.code(), theirs.status.code()), (Some(3), Some(3)));
    // `ubtrfs` names the file, once.
    let named = ubtrfs(["scrub", "start", "-Br", "--json", &text(&copy)]);
    assert_eq!(named.status.code(), Some(3));
    let value: Value = serde_json::from_slice(&named.stdout).unwrap();
    assert_eq!(value["files"].as_array().unwrap().len(), 1, "{value}");
    assert_eq!((&value["files"][0]["path"], &value["files"][0]["lost_bytes"]), (&"file".into(), &12288.into()));
    let stderr = String::from_utf8_lossy(&named.stderr);
    assert_eq!(stderr.matches("file: 12288 bytes have no good copy").count(), 1, "{stderr}");
    assert!(stderr.contains("of tree blocks are bad in one copy, and another is good; scrub without -r"), "{stderr}");
    assert!(fs::read(&copy).unwrap() == fs::read(image.path()).unwrap(), "-r changes nothing");
}

#[test]
fn what_is_repaired_satisfies_linux() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = damaged(0);
    let dir = tempfile::tempdir().unwrap();
    let mount = Mounted::new(image.path(), &dir.path().join("mount"));
    let at = text(&mount.0);
    let done = ubtrfs(["scrub", "start", "-B", &at]);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    // Reading the tree at mount may have repaired the block before.
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(said.contains("no errors found") || said.contains("Uncorrectable:  0"), "{said}");
    assert!(ok(ubtrfs(["scrub", "start", "-B", &at])).contains("no errors found"));
    drop(mount);
    btrfs_check(image.path()).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    linux.scrub().unwrap();
    linux.close().unwrap();
}

#[test]
fn a_scrub_in_the_background_is_shown_cancelled_and_resumed() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mount = Mounted::new(image.path(), &dir.path().join("mount"));
    let at = text(&mount.0);
    fs::write(mount.0.join("file"), vec![7; 100 * MIB]).unwrap();
    ok(ubtrfs(["sync", &at]));
    assert!(ok(ubtrfs(["scrub", "status", &at])).contains("no stats available"));
    let idle = ubtrfs(["scrub", "cancel", &at]);
    assert_eq!(idle.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&idle.stderr).contains("not running"));
    // At this rate it would take minutes.
    assert!(ok(ubtrfs(["scrub", "start", "--limit=1M", &at])).starts_with(&format!("scrub started on {at}, fsid ")));
    let shown = ok(ubtrfs(["scrub", "status", &at]));
    assert!(shown.contains("Status:           running") && shown.contains("(limit 1.00MiB/s)"), "{shown}");
    let again = ubtrfs(["scrub", "start", "-B", &at]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("scrub cancel"), "{again:?}");
    assert!(ok(ubtrfs(["scrub", "limit", "-a", "-l", "2M", &at])).contains("2.00MiB/s"));
    // The amount to scrub is what extents use, not the device extents, of which most is empty.
    let by_device = ok(ubtrfs(["scrub", "status", "-d", "--mbytes", &at]));
    let to_scrub = by_device.lines().find_map(|line| line.strip_prefix("Total to scrub:")).unwrap().trim();
    let mib: f64 = to_scrub.trim_end_matches("MiB").parse().unwrap();
    assert!((100.0..110.0).contains(&mib), "{by_device}");
    assert_eq!(ok(ubtrfs(["scrub", "cancel", &at])), "scrub cancelled\n");
    let status = || -> Value { serde_json::from_str(&ok(ubtrfs(["scrub", "status", "--json", &at]))).unwrap() };
    assert_eq!(status()["devices"][0]["status"], "aborted", "{}", status());
    assert!(ok(ubtrfs(["scrub", "resume", "-B", &at])).contains("no errors found"));
    let value = status();
    let device = &value["devices"][0];
    assert_eq!((&device["status"], device["resumed"].is_u64()), (&"finished".into(), true), "{value}");
    assert_eq!(device["counts"]["data_bytes_scrubbed"], 100 * MIB, "nothing is scrubbed twice");
    let done = ubtrfs(["scrub", "resume", "-B", &at]);
    assert_eq!(done.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&done.stdout).contains("nothing to resume"));
    // As on Linux, the mount of a running scrub is busy.
    ok(ubtrfs(["scrub", "start", "--limit=1M", &at]));
    let busy = ubtrfs(["umount", &at]);
    assert!(String::from_utf8_lossy(&busy.stderr).contains("busy"), "{busy:?}");
    ok(ubtrfs(["scrub", "cancel", &at]));
    drop(mount);
    btrfs_check(image.path()).unwrap();
}

/// The I/O priorities of the threads of a process, as `ionice` prints them.
fn priorities(pid: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of_thread = |thread: fs::DirEntry| {
        let output = Command::new("ionice").arg("-p").arg(thread.file_name()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    threads.map(of_thread).collect()
}

#[test]
fn the_threads_of_a_scrub_have_the_given_io_priority() {
    if !capability::kernel_oracle() || !capability::fuse() || !capability::program("ionice") {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("mount");
    for sandbox in ["--no-sandbox", "--sandbox"] {
        fs::create_dir_all(&at).unwrap();
        ok(ubtrfs(["mount", sandbox, &text(image.path()), &text(&at)]));
        let mount = Mounted(at.clone());
        fs::write(at.join("file"), vec![7; 50 * MIB]).unwrap();
        ok(ubtrfs(["sync", &text(&at)]));
        for (options, expected) in [(&["-c", "2", "-n", "6"][..], "best-effort: prio 6"), (&["-c3"], "idle")] {
            let place = text(&at);
            ok(ubtrfs([&["scrub", "start", "--limit=1M"], options, &[&place]].concat()));
            let found = priorities(server_of(&at));
            assert!(found.contains(expected) && found.len() > 1, "{sandbox}: {found:?}");
            ok(ubtrfs(["scrub", "cancel", &text(&at)]));
        }
        drop(mount);
    }
    refused(&ubtrfs(["scrub", "start", "-B", "-c", "4", &text(image.path())]), &["0..=3"]);
    refused(&ubtrfs(["scrub", "start", "-B", "-c", "0", "-n", "3", &text(image.path())]), &["I/O priority", "-c, -n"]);
}

#[test]
fn who_may_only_read_an_image_is_told_of_scrubs_that_only_look() {
    if !capability::kernel_oracle() {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let [a, b] = ["a", "b"].map(|name| text(&dir.path().join(name)));
    ok(ubtrfs(["mkfs", "-q", "-d", "raid1", "-m", "raid1", "-b", "200M", &a, &b]));
    for image in [&a, &b] {
        fs::set_permissions(image, fs::Permissions::from_mode(0o644)).unwrap();
    }
    let as_user = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(["scrub", "start"]).args(options).arg(&a).env("HOME", "/nonexistent");
        command.uid(65534).gid(65534).output().unwrap()
    };
    let refused = as_user(&["-B"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("no permission to read and write") && said.contains("with -r"), "{said}");
    assert!(!said.contains("degraded"), "{said}");
    assert!(as_user(&["-Br"]).status.success());
}

#[test]
fn an_image_means_all_devices_of_its_filesystem() {
    let dir = tempfile::tempdir().unwrap();
    let images: Vec<String> = ["a", "b", "c"].iter().map(|name| text(&dir.path().join(name))).collect();
    let args = ["mkfs", "-q", "-d", "raid1", "-m", "raid1", "-b", "200M"].map(str::to_owned);
    ok(ubtrfs(args.iter().chain(&images)));
    let value = |args: &[&str]| -> Value { serde_json::from_str(&ok(ubtrfs(args))).unwrap() };
    for image in &images {
        let scrubbed = value(&["scrub", "start", "--json", image]);
        assert_eq!(scrubbed["devices"].as_array().unwrap().len(), 3, "{scrubbed}");
        assert_eq!(value(&["scrub", "status", "--json", image])["devices"].as_array().unwrap().len(), 3);
    }
}

#[test]
fn a_scrub_names_each_device_that_it_leaves_out() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| text(&dir.path().join(name)));
    ok(ubtrfs(["mkfs", "-q", "-d", "raid1", "-m", "raid1", "-b", "200M", &a, &b]));
    let told = |output: &Output| (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned());
    // A device fails while the filesystem is mounted.
    let mount = Mounted::new(Path::new(&a), &dir.path().join("mount"));
    let at = text(&mount.0);
    fs::File::options().write(true).open(&b).unwrap().set_len(100 << 20).unwrap();
    fs::write(mount.0.join("file"), vec![7; MIB]).unwrap();
    ok(ubtrfs(["sync", &at]));
    let failed = format!(
        "device 2 ({b}) failed, so it was not scrubbed; unless it comes back, replace it: ubtrfs replace start 2 NEW {at}"
    );
    for line in [&["scrub", "start", "-B", &at][..], &["scrub", "start", "-Br", &at]] {
        let (status, said) = told(&ubtrfs(line));
        assert!(status == Some(4) && said.contains(&failed), "{status:?} {said}");
    }
    let shown = ubtrfs(["scrub", "status", &at]);
    assert!(
        told(&shown).1.contains(&failed) && String::from_utf8_lossy(&shown.stdout).contains("finished"),
        "{shown:?}"
    );
    let begun = ubtrfs(["scrub", "start", &at]);
    assert!(begun.status.success() && told(&begun).1.contains(&failed), "{begun:?}");
    drop(mount);
    // It is missing.
    fs::remove_file(&b).unwrap();
    for options in [&["-o", "degraded"][..], &["-r"]] {
        let line = [&["scrub", "start", "--json"][..], options, &[&a]].concat();
        let output = ubtrfs(&line);
        let (status, said) = told(&output);
        assert!(
            status == Some(4) && said.contains("device 2 is missing") && said.contains("-o degraded 2 NEW"),
            "{said}"
        );
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["not_scrubbed"][0]["devid"], 2, "{value}");
        assert_eq!(value["not_scrubbed"][0]["state"], "missing", "{value}");
    }
    // As btrfs-progs prints it.
    let linux = LoopMount::new(Path::new(&a), "degraded").unwrap();
    let scrub = |words: &[&str]| {
        let line = ["scrub", "start"].iter().chain(words).copied().chain([linux.path().to_str().unwrap()]);
        Command::new("btrfs").args(line).env("LC_ALL", "C").output().unwrap()
    };
    let theirs = [scrub(&["-B"]), scrub(&["-Bd"])];
    linux.close().unwrap();
    let ours =
        [&["-B"], &["-Bd"]].map(|words| as_btrfs(&[&["scrub", "start"][..], words, &["-o", "degraded", &a]].concat()));
    let shown = |output: &Output| {
        let text = normal(&String::from_utf8_lossy(&output.stdout));
        let device =
            |line: &str| line.strip_prefix("Scrub device /").map(|rest| rest.split(' ').skip(1).collect::<String>());
        text.lines().map(|line| device(line).unwrap_or_else(|| line.to_owned())).collect::<Vec<_>>()
    };
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!((shown(ours), ours.status.code()), (shown(theirs), theirs.status.code()));
        let (ours, theirs) = (told(ours).1, told(theirs).1);
        assert!(theirs.contains("WARNING: device 2 not present"), "{theirs}");
        assert!(ours.contains("WARNING: device 2 not present"), "{ours}");
    }
}

#[test]
fn a_scrub_does_not_advise_to_replace_a_seed_device() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| text(&dir.path().join(name)));
    ok(ubtrfs(["mkfs", "-q", "-d", "raid1", "-m", "raid1", "-b", "200M", &a, &b]));
    ok(ubtrfs(["tune", "-S", "1", &a]));
    fs::File::create(&c).unwrap().set_len(300 << 20).unwrap();
    ok(ubtrfs(["device", "add", &c, &a]));
    fs::remove_file(&b).unwrap();
    let output = ubtrfs(["scrub", "start", "-r", "-o", "degraded", &c]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("device 2") && said.contains("of the seed is missing"), "{output:?}");
    assert!(said.contains("-o device=PATH") && !said.contains("replace start"), "{said}");
}

#[test]
fn parity_is_only_read_and_a_scrub_says_so() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = ["a", "b", "c"].map(|name| text(&dir.path().join(name)));
    for image in &images {
        fs::File::create(image).unwrap().set_len(300 * MIB as u64).unwrap();
    }
    let line = ["-q", "-d", "raid5", "-m", "raid1"].map(str::to_owned);
    run("mkfs.btrfs", line.iter().chain(&images)).unwrap();
    let at = text(&dir.path().join("mount"));
    fs::create_dir(&at).unwrap();
    assert!(ubtrfs(["mount", &images[0], &at]).status.success());
    let outputs = ["-B", "-Br"].map(|how| ubtrfs(["scrub", "start", how, &at]));
    ok(ubtrfs(["umount", &at]));
    for output in &outputs {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("RAID5 and RAID6") && said.contains("Linux"), "{said}");
        assert!(!said.contains("use a writable one"), "{said}");
    }
}

#[test]
fn wrong_uses_are_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    ok(ubtrfs(["mkfs", "-q", "-b", "200M", &text(&image)]));
    for (args, words) in
        [(vec!["scrub", "start", "nope"], vec!["nope"]), (vec!["scrub", "limit", "-l", "1M"], vec!["--all"])]
    {
        let args: Vec<String> = args
            .into_iter()
            .map(str::to_owned)
            .chain([text(&image)].into_iter().filter(|_| words == ["--all"]))
            .collect();
        let output = ubtrfs(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(words.iter().all(|word| stderr.contains(word)), "{args:?}: {stderr}");
    }
    // An image is scrubbed without rights, mount and record of its own.
    let output = ok(ubtrfs(["scrub", "start", "-B", &text(&image)]));
    assert!(output.contains("no errors found"), "{output}");
}
