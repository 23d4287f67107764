//! Tests of commands that read the last commit of an image while a server has it mounted, by the path of the image or of a
//! directory in the mount.
//!
//! Method: at rest, the output is that of btrfs-progs, which takes no locks. While programs write and commits follow each
//! other, every result is that of one commit: no block of a newer commit counts as damage.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use ubtrfs_testkit::{capability, run};

use crate::common::{ok, refused, text, ubtrfs};

struct Mounted(TempDir);

impl Mounted {
    /// Mounts a new image with some files, and commits.
    fn new() -> Option<Self> {
        if !capability::fuse() || !capability::kernel_oracle() {
            return None;
        }
        let mounted = Self(TempDir::with_prefix("ubtrfs-mounted-").unwrap());
        std::fs::create_dir(mounted.path("m")).unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", &mounted.text("e.img")]));
        ok(ubtrfs(["mount", &mounted.text("e.img"), &mounted.text("m")]));
        mounted.write_files(0);
        mounted.sync();
        Some(mounted)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    fn write_files(&self, round: u32) {
        for file in 0..200 {
            let path = self.path(&format!("m/file-{:03}", (file + round * 37) % 300));
            std::fs::write(path, vec![u8::try_from(file).unwrap(); 300 * (1 + file as usize % 20)]).unwrap();
        }
    }

    fn sync(&self) {
        ok(ubtrfs(["sync", &self.text("m")]));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = ubtrfs(["umount", &self.text("m")]);
    }
}

/// The output of a command that succeeds and says that the image is in use.
#[track_caller]
fn noted(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{stderr}{stdout}");
    assert!(stderr.lines().count() == 1 && stderr.contains("its last commit"), "{stderr}");
    stdout
}

/// Lines without the version of the program and without the path of the image.
fn content(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.contains(" v") && !line.starts_with("superblock:")).collect()
}

#[test]
fn inspect_shows_the_last_commit_of_a_mounted_image() {
    let Some(mounted) = Mounted::new() else { return };
    let image = mounted.text("e.img");
    for words in [&["dump-super"][..], &["dump-tree"], &["dump-tree", "-t", "fs"]] {
        let theirs = run("btrfs", [&["inspect-internal"][..], words, &[&*image]].concat()).unwrap();
        for place in ["e.img", "m"] {
            let ours = noted(&ubtrfs([&["inspect"][..], words, &[&*mounted.text(place)]].concat()));
            assert_eq!(content(&ours), content(&theirs), "{words:?} {place}");
        }
    }
    let trees = noted(&ubtrfs(["stats", &image]));
    assert!(trees.contains("fs tree"), "{trees}");
    let inside = noted(&ubtrfs(["inspect", "dump-super", &mounted.text("m/.")]));
    assert!(inside.contains(&image), "{inside}");
}

#[test]
fn check_with_force_checks_the_last_commit_of_a_mounted_image() {
    let Some(mounted) = Mounted::new() else { return };
    let refusal = ubtrfs(["check", &mounted.text("e.img")]);
    let said = String::from_utf8_lossy(&refusal.stderr).into_owned();
    assert_eq!(refusal.status.code(), Some(2), "{said}");
    assert!(said.contains("has mounted it on") && said.contains("--force"), "{said}");
    for place in ["e.img", "m"] {
        let report = noted(&ubtrfs(["check", "--force", &mounted.text(place)]));
        assert!(report.contains("clean"), "{report}");
    }
}

#[test]
fn filesystem_show_works_on_a_mounted_image() {
    let Some(mounted) = Mounted::new() else { return };
    for words in [["filesystem", "show"], ["filesystem", "df"], ["filesystem", "usage"]] {
        let [by_image, by_dir] = ["e.img", "m"].map(|place| {
            let place = mounted.text(place);
            ok(ubtrfs(words.into_iter().chain([&*place])))
        });
        assert!(!by_dir.is_empty());
        assert_eq!(by_image, by_dir, "{words:?}");
    }
}

#[test]
fn a_directory_that_is_no_mount_is_refused() {
    let dir = TempDir::with_prefix("ubtrfs-mounted-").unwrap();
    refused(&ubtrfs(["inspect", "dump-super", &text(dir.path())]), &["is a directory", "name the image"]);
}

#[test]
fn a_reader_beside_commits_sees_one_commit() {
    let Some(mounted) = Mounted::new() else { return };
    let (ends, nr_commits) = (AtomicBool::new(false), std::sync::atomic::AtomicU32::new(0));
    std::thread::scope(|scope| {
        let ends_at_return = EndOnDrop(&ends);
        scope.spawn(|| {
            while !ends.load(Ordering::SeqCst) {
                let round = nr_commits.fetch_add(1, Ordering::SeqCst);
                mounted.write_files(round);
                mounted.sync();
            }
        });
        for _ in 0..15 {
            let report = noted(&ubtrfs(["check", "--force", &mounted.text("e.img")]));
            assert!(report.contains("clean"), "{report}");
            let dump = noted(&ubtrfs(["inspect", "dump-tree", &mounted.text("m")]));
            assert!(dump.contains("file-001"));
            noted(&ubtrfs(["inspect", "dump-super", "-a", &mounted.text("m")]));
        }
        drop(ends_at_return);
    });
    assert!(nr_commits.load(Ordering::SeqCst) > 15, "{nr_commits:?}");
}

/// Ends the writer, also if the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Damage that no commit explains is reported.
#[test]
fn damage_of_a_mounted_image_is_reported() {
    let Some(mounted) = Mounted::new() else { return };
    let image = mounted.path("e.img");
    let dump = noted(&ubtrfs(["inspect", "dump-tree", "-t", "fs", &text(&image)]));
    let leaf = dump.lines().find_map(|line| line.strip_prefix("leaf ")?.split(' ').next()).unwrap();
    overwrite(&image, leaf.parse().unwrap());
    let dump = ubtrfs(["inspect", "dump-tree", "-t", "fs", &text(&image)]);
    // The profile of metadata has a second copy, which is shown, or the damage is told.
    let report = ubtrfs(["check", "--force", &text(&image)]);
    let found = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(!report.status.success() && found.contains(leaf), "{found}{dump:?}");
}

/// Overwrites a tree block in the first copy of its chunk.
fn overwrite(image: &Path, logical: u64) {
    use std::os::unix::fs::FileExt;
    let chunks = run("btrfs", ["inspect-internal", "dump-tree", "-t", "chunk", image.to_str().unwrap()]).unwrap();
    let (mut start, mut physical) = (None, None);
    for line in chunks.lines() {
        if let Some((_, rest)) = line.split_once("FIRST_CHUNK_TREE CHUNK_ITEM ") {
            start =
                rest.split(')').next().and_then(|number| number.parse::<u64>().ok()).filter(|start| *start <= logical);
        }
        if let (Some(start), Some((_, offset))) = (start, line.split_once("stripe 0 devid 1 offset ")) {
            physical = Some(offset.trim().parse::<u64>().unwrap() + logical - start);
        }
    }
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(&[0x5a; 4096], physical.unwrap()).unwrap();
}
