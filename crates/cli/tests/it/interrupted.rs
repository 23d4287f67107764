//! Tests of commands that are interrupted or killed while they write: a file gets its name only when it is complete,
//! and an existing image that is overwritten contains no filesystem until the new filesystem is complete.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{ok, refused};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use ubtrfs_testkit::{LoopMount, btrfs_check, capability};

/// Makes a command that handles signals as in a terminal, even if the tests run in the background and ignore them.
fn command(line: &str, dir: &Path) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT,TERM", env!("CARGO_BIN_EXE_ubtrfs")]);
    command.args(line.split(' ')).current_dir(dir).stdin(Stdio::null());
    command
}

fn run(line: &str, dir: &Path) -> Output {
    command(line, dir).output().unwrap()
}

/// A directory with `tree/` (a small and a large file), the image `a.img` of that tree, and the archive `big.tar` of
/// the image.
struct Bed(TempDir);

const BIG: usize = 192 << 20;

impl Bed {
    fn new() -> Self {
        let bed = Self(tempfile::tempdir().unwrap());
        fs::create_dir(bed.join("tree")).unwrap();
        fs::write(bed.join("tree/a"), "a").unwrap();
        fs::write(bed.join("tree/big"), vec![7; BIG]).unwrap();
        ok(run("mkfs -q -r tree a.img", bed.0.path()));
        ok(run("export -f big.tar a.img:/", bed.0.path()));
        fs::create_dir(bed.join("out")).unwrap();
        bed
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn out(&self) -> Vec<String> {
        let names = fs::read_dir(self.join("out")).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Starts a command, and sends it a signal when the files in `out` have grown by 8 MiB.
    fn interrupt(&self, line: &str, signal: Signal) {
        let blocks = || blocks_below(&self.join("out"));
        let before = blocks();
        let said = fs::File::create(self.join("said")).unwrap();
        let mut child = command(line, self.0.path()).stderr(said).spawn().unwrap();
        let start = Instant::now();
        while blocks() < before + (8 << 11) {
            assert!(child.try_wait().unwrap().is_none(), "{line}: ended before it could be interrupted");
            assert!(start.elapsed() < Duration::from_secs(60), "{line}: nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()), "{line}: ended by the signal");
    }
}

/// Counts the blocks of all files below a directory; files may appear and vanish meanwhile.
fn blocks_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let blocks_of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => blocks_below(&entry.path()),
        meta => meta.map_or(0, |meta| meta.blocks()),
    };
    entries.map(blocks_of).sum()
}

const SIGNALS: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL];

#[test]
fn an_interrupted_command_leaves_no_file_that_looks_whole() {
    let bed = Bed::new();
    for signal in SIGNALS {
        for line in [
            "cp a.img:/big out/big",
            "cp -r a.img:/ out/tree",
            "export -f out/a.tar a.img:/",
            "mkfs -q -r tree out/new.img",
            "import --create 1G big.tar out/new.img:/",
        ] {
            bed.interrupt(line, signal);
            let mut left = bed.out();
            if line.contains("out/tree") {
                assert!(!bed.join("out/tree/big").exists(), "{line}");
                left.retain(|name| name != "tree");
                let below = fs::read_dir(bed.join("out/tree")).unwrap().map(|entry| entry.unwrap().file_name());
                left.extend(below.map(|name| name.into_string().unwrap()).filter(|name| name != "a"));
            }
            match signal {
                Signal::KILL => assert!(left.iter().all(|name| name.starts_with(".ubtrfs-")), "{line}: {left:?}"),
                _ => assert!(left.is_empty(), "{line}, {signal:?}: {left:?} is left"),
            }
            fs::remove_dir_all(bed.join("out")).unwrap();
            fs::create_dir(bed.join("out")).unwrap();
        }
        // An existing file stays unchanged.
        for line in ["cp a.img:/big out/old", "export -f out/old a.img:/"] {
            fs::write(bed.join("out/old"), "old").unwrap();
            bed.interrupt(line, signal);
            assert_eq!(fs::read(bed.join("out/old")).unwrap(), b"old", "{line}, {signal:?}");
            fs::remove_dir_all(bed.join("out")).unwrap();
            fs::create_dir(bed.join("out")).unwrap();
        }
    }
}

#[test]
fn an_interrupted_import_says_what_it_leaves() {
    let bed = Bed::new();
    for signal in [Signal::INT, Signal::TERM] {
        ok(run("mkfs -q -b 1G out/old.img", bed.0.path()));
        bed.interrupt("import big.tar out/old.img:/dir", signal);
        let said = fs::read_to_string(bed.join("said")).unwrap();
        assert!(said.starts_with("ubtrfs: interrupted: out/old.img:/dir has only a part of the archive"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        // The advice works.
        assert!(run("import big.tar out/old.img:/dir", bed.0.path()).status.success());
        assert_eq!(ok(run("cat out/old.img:/dir/a", bed.0.path())), "a");
        ok(run("check out/old.img", bed.0.path()));
        fs::remove_file(bed.join("out/old.img")).unwrap();
    }
}

#[test]
fn an_image_that_was_being_filled_is_no_filesystem() {
    let bed = Bed::new();
    for (nr, signal) in SIGNALS.into_iter().enumerate() {
        let image = bed.join("out/old.img");
        if nr % 2 == 0 {
            fs::File::create(&image).unwrap().set_len(1 << 30).unwrap();
        } else {
            ok(run("mkfs -q -b 1G out/old.img", bed.0.path()));
        }
        bed.interrupt("mkfs -q -f -K -r tree out/old.img", signal);
        assert_eq!(bed.out(), ["old.img"]);
        refused(&run("ls out/old.img", bed.0.path()), &["is not a btrfs filesystem"]);
        if capability::kernel_oracle() {
            assert!(LoopMount::new(&image, "ro").is_err(), "Linux does not take it for one either");
        }
        // If the command is repeated without an interruption, it succeeds.
        ok(run("mkfs -q -r tree out/old.img", bed.0.path()));
        assert!(fs::metadata(bed.join("out/old.img")).unwrap().len() == 1 << 30);
        assert_eq!(ok(run("ls out/old.img", bed.0.path())), "a\nbig\n");
        ok(run("check out/old.img", bed.0.path()));
        fs::remove_file(&image).unwrap();
    }
}

/// A signal that was ignored at the program's start, as by nohup, does not end the program.
#[test]
fn an_ignored_signal_stays_ignored() {
    let bed = Bed::new();
    let script = format!("trap '' HUP INT; exec {} cp a.img:/big out/big", env!("CARGO_BIN_EXE_ubtrfs"));
    let mut child = Command::new("sh").args(["-c", &script]).current_dir(bed.0.path()).spawn().unwrap();
    while bed.out().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    while child.try_wait().unwrap().is_none() {
        for signal in [Signal::HUP, Signal::INT] {
            let _ = kill_process(Pid::from_child(&child), signal);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::metadata(bed.join("out/big")).unwrap().len(), BIG as u64);
    assert_eq!(bed.out(), ["big"]);
}

/// As with cp -r, unreadable files are reported, the rest is copied, and the status is 1.
#[test]
fn mkfs_goes_on_after_a_file_that_cannot_be_read() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    fs::create_dir_all(path.join("tree/closed")).unwrap();
    fs::create_dir_all(path.join("tree/last")).unwrap();
    for name in ["a", "bad", "closed/x", "last/z"] {
        fs::write(path.join("tree").join(name), name).unwrap();
    }
    for name in ["tree", "tree/a", "tree/bad", "tree/closed", "tree/last", "tree/last/z", "."] {
        std::os::unix::fs::chown(path.join(name), Some(4711), Some(4712)).unwrap();
    }
    for (name, mode) in [("tree/bad", 0), ("tree/closed", 0)] {
        fs::set_permissions(path.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    let as_user = |line: &str| command(line, path).uid(4711).gid(4712).output().unwrap();
    for (nr, line) in ["mkfs -q -r tree new.img", "mkfs -q -f -r tree new.img", "mkfs --json -r tree json.img"]
        .into_iter()
        .enumerate()
    {
        let output = as_user(line);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {stderr}");
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(lines.len(), 3, "{line}: {stderr}");
        assert!(lines[0].contains("tree/bad'") && lines[1].contains("tree/closed'"), "{stderr}");
        let image = if nr == 2 { "json.img" } else { "new.img" };
        assert!(lines[2].contains(&format!("2 files were not copied; all other files are in {image}")), "{stderr}");
        assert_eq!(ok(run(&format!("ls {image}"), path)), "a\nclosed\nlast\n");
        assert_eq!(ok(run(&format!("cat {image}:/last/z"), path)), "last/z");
        if nr == 2 {
            let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(told["not_copied"], 2);
        }
        ok(run(&format!("check {image}"), path));
        if capability::kernel_oracle() {
            btrfs_check(&path.join(image)).unwrap();
        }
    }
    // A full filesystem ends the copy, because no other file would fit and a partial copy is useless.
    fs::write(path.join("tree/huge"), vec![7; 200 << 20]).unwrap();
    refused(&run("mkfs -q -b 128M -r tree full.img", path), &["space"]);
    assert!(!path.join("full.img").exists());
    let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.into_iter().any(|name| name.starts_with(".ubtrfs")));
}
