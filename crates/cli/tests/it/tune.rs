//! Tests `ubtrfs tune`, by the name `btrfstune` too: Linux and btrfs-progs accept each result.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;
use ubtrfs_testkit::{LoopMount, btrfs_check_array, capability, run};

use crate::common::{ok, refused, text, ubtrfs};

/// A new id. Tests run side by side, and devices are found by the id of the filesystem.
fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn id_of(image: &str) -> String {
    let facts = facts(image.as_ref());
    facts.split("\nfsid ").nth(1).unwrap().split('\n').next().unwrap().to_owned()
}

/// The lines of `btrfs inspect dump-super` about the id, the flags and the features.
fn facts(image: &Path) -> String {
    let shown = ok(Command::new("btrfs").args(["inspect-internal", "dump-super"]).arg(image).output().unwrap());
    let is_fact = |line: &&str| {
        ["fsid", "metadata_uuid", "flags", "incompat_flags", "dev_item.fsid"].iter().any(|name| line.starts_with(name))
    };
    shown
        .lines()
        .filter(is_fact)
        .map(|line| format!("{}\n", line.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect()
}

fn made(dir: &TempDir, names: &[&str]) -> Vec<String> {
    let paths: Vec<String> = names.iter().map(|name| text(&dir.path().join(name))).collect();
    let mut line = vec!["mkfs", "-q", "-b", "300M", "-d", if names.len() > 1 { "raid1" } else { "single" }];
    line.extend(paths.iter().map(String::as_str));
    ok(ubtrfs(&line));
    let source = dir.path().join("source");
    fs::write(&source, "content").unwrap();
    ok(ubtrfs(["cp", &text(&source), &format!("{}:/file", paths[0])]));
    paths
}

/// Runs `ubtrfs tune` with these words on all devices.
fn tune(words: &[&str], paths: &[String]) -> Output {
    ubtrfs(["tune"].iter().chain(words).copied().chain(paths.iter().map(String::as_str)))
}

fn reads(paths: &[String]) {
    let images: Vec<&Path> = paths.iter().map(Path::new).collect();
    btrfs_check_array(&images).unwrap();
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/file", paths[0])])), "content");
    let mount = LoopMount::array(&images, "").unwrap();
    assert_eq!(fs::read_to_string(mount.join("file")).unwrap(), "content");
    fs::write(mount.join("linux"), "written").unwrap();
    mount.close().unwrap();
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/linux", paths[0])])), "written");
}

#[test]
fn the_id_changes_on_all_devices_and_back() {
    if !capability::kernel_oracle() {
        return;
    }
    for names in [&["a.img"][..], &["b.img", "c.img"], &["d.img", "e.img", "f.img"]] {
        let dir = TempDir::new().unwrap();
        let paths = made(&dir, names);
        let before = facts(paths[0].as_ref());
        let old = id_of(&paths[0]);
        let id = new_id();
        if let Some(other) = paths.get(1) {
            // Beside a copy of a device, the other devices that are found may belong to the original.
            refused(&ubtrfs(["tune", "-M", &id, &paths[0]]), &[other, "name all devices"]);
        }
        ok(tune(&["-M", &id], &paths));
        for path in &paths {
            let after = facts(path.as_ref());
            assert!(
                after.contains(&format!("\nfsid {id}\n")) && after.contains(&format!("metadata_uuid {old}")),
                "{after}"
            );
        }
        reads(&paths);
        ok(tune(&["-m"], &paths));
        assert!(!facts(paths[0].as_ref()).contains(&id));
        reads(&paths);
        ok(tune(&["-M", &old], &paths));
        // Linux sets big-metadata in each filesystem that it mounts.
        assert_eq!(facts(paths[0].as_ref()).replace("incompat_flags 0x361", "incompat_flags 0x341"), before);
        reads(&paths);
    }
}

#[test]
fn the_same_change_gives_the_bytes_of_btrfs_progs() {
    if !capability::kernel_oracle() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let paths = made(&dir, &["a.img"]);
    let copy = dir.path().join("copy.img");
    let sandbox = dir.path().join("bin");
    fs::create_dir(&sandbox).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), sandbox.join("btrfstune")).unwrap();
    let id = new_id();
    for options in [&["-r", "-x", "-n"][..], &["-S", "1"], &["-f", "-S", "0"], &["-M", &id]] {
        fs::copy(&paths[0], &copy).unwrap();
        run("btrfstune", options.iter().copied().chain([copy.to_str().unwrap()])).unwrap();
        ok(Command::new(sandbox.join("btrfstune")).args(options).arg(&paths[0]).output().unwrap());
        assert_eq!(facts(paths[0].as_ref()), facts(&copy), "{options:?}");
    }
}

#[test]
fn an_interrupted_change_is_refused_and_completed() {
    if !capability::kernel_oracle() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let paths = made(&dir, &["a.img", "b.img"]);
    // The first device is done, the second one still has its old id and the flag.
    let second = fs::read(&paths[1]).unwrap();
    let id = new_id();
    ok(tune(&["-M", &id], &paths));
    fs::write(&paths[1], second).unwrap();
    let image = &paths[1];
    for offset in ubtrfs_format::superblock::SUPERBLOCK_OFFSETS.into_iter().filter(|offset| *offset < 300 << 20) {
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().read(true).write(true).open(image).unwrap();
        let mut raw = vec![0; 4096];
        file.read_exact_at(&mut raw, offset).unwrap();
        let mut superblock = ubtrfs_format::superblock::Superblock::decode(&raw).unwrap();
        superblock.flags |= ubtrfs_format::superblock::flags::CHANGING_FSID_V2;
        file.write_all_at(&superblock.encode_with_csum(), offset).unwrap();
    }
    refused(&ubtrfs(["ls", &format!("{}:/", paths[1])]), &["ubtrfs tune -m"]);
    refused(&tune(&["-n"], &paths), &["was interrupted"]);
    refused(&ubtrfs(["tune", "-m", &paths[1]]), &["1 of the 2 devices"]);
    ok(tune(&["-M", &id], &paths));
    reads(&paths);
}

#[test]
fn the_id_changes_in_all_blocks() {
    if !capability::kernel_oracle() {
        return;
    }
    for names in [&["a.img"][..], &["b.img", "c.img"]] {
        let dir = TempDir::new().unwrap();
        let paths = made(&dir, names);
        let old = id_of(&paths[0]);
        let id = new_id();
        ok(tune(&["-U", &id], &paths));
        let after = facts(paths[0].as_ref());
        assert!(
            after.contains(&format!("\nfsid {id}\n")) && after.contains(&format!("dev_item.fsid {id} ")),
            "{after}"
        );
        let dump = ok(ubtrfs(["inspect", "dump-tree", &paths[0]]));
        assert!(dump.contains(&id) && !dump.contains(&old));
        reads(&paths);
        ok(tune(&["-u"], &paths));
        assert!(!facts(paths[0].as_ref()).contains(&id));
        reads(&paths);
    }
}

#[test]
fn what_cannot_be_changed_is_refused_with_the_reason() {
    let dir = TempDir::new().unwrap();
    let paths = made(&dir, &["a.img"]);
    let (image, before) = (&paths[0], fs::read(&paths[0]).unwrap());
    let fails = |line: &[&str], why: &str| {
        let done = ubtrfs(line);
        assert!(!done.status.success(), "{line:?}");
        assert!(String::from_utf8_lossy(&done.stderr).contains(why), "{line:?}: {done:?}");
    };
    fails(&["tune", image], "at least one option");
    fails(&["tune", "-u", "-U", &new_id(), image], "give -u or -U");
    fails(&["tune", "-U", "00000000-0000-0000-0000-000000000000", image], "cannot be zero");
    if capability::kernel_oracle() {
        fails(&["tune", "-U", &id_of(image), image], "has this id already");
    }
    fails(&["tune", "-M", "nonsense", image], "could not parse UUID: nonsense");
    fails(&["tune", "-M", "00000000-0000-0000-0000-000000000000", image], "cannot be zero");
    fails(&["tune", "-S", "2", image], "give 1 to set");
    fails(&["tune", "-f", "-S", "0", image], "has no seeding flag");
    fails(&["tune", "-m", image, image], "open already");
    assert!(fs::read(image).unwrap() == before);
    ok(ubtrfs(["tune", "-S", "1", image]));
    fails(&["tune", "-S", "1", image], "already set");
    fails(&["tune", "-m", image], "on a seed device");
    fails(&["tune", "-S", "0", image], "canceled");
    fails(&["mkdir", &format!("{image}:/new")], "seed");
    ok(ubtrfs(["tune", "-f", "-S", "0", image]));
    assert!(fs::read(image).unwrap() == before);
}
