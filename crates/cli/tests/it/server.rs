//! Tests of how the server starts: it does not keep files open that it inherits from the starting process, and the
//! resource limits of the starting process do not end the server.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;
use ubtrfs_testkit::{Image, btrfs_check, capability};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle()
}

fn shell(script: &str) -> Output {
    Command::new("timeout").args(["60", "bash", "-c", script]).output().unwrap()
}

#[track_caller]
fn ok(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Open files of all processes, as the kernel shows them.
fn open_files() -> impl Iterator<Item = PathBuf> {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_str().unwrap().parse::<u32>().is_ok());
    let files = pids.flat_map(|pid| fs::read_dir(pid.path().join("fd")).into_iter().flatten().flatten());
    files.filter_map(|file| fs::read_link(file.path()).ok())
}

#[test]
fn the_server_holds_no_file_of_its_caller() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    for options in ["", "--sandbox"] {
        let dir = TempDir::with_prefix("ubtrfs-server-").unwrap();
        let (lock, at) = (dir.path().join("lock"), dir.path().join("at"));
        fs::create_dir(&at).unwrap();
        let (lock, at, image) = (lock.display(), at.display(), image.path().display());
        // The mount inherits flock's locked file and the pipe. `cat` ends and the second flock succeeds only if the
        // server has closed the file and the pipe.
        ok(&shell(&format!("flock {lock} {UBTRFS} mount {options} {image} {at} 3>&1 | cat && flock -n {lock} true")));
        assert!(open_files().all(|file| file.as_os_str() != lock.to_string().as_str()));
        ok(&shell(&format!("{UBTRFS} umount {at}")));
    }
}

#[test]
fn a_limit_on_file_sizes_does_not_end_the_server() {
    if !ready() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-server-").unwrap();
    let (path, at) = (image.path().display(), dir.path().display());
    // The unit of bash's `ulimit -f` is 1 KiB. Any user may raise a soft limit, only root a hard limit.
    let hard = shell(&format!("ulimit -f 10240; exec {UBTRFS} mount {path} {at}"));
    match hard.status.success() {
        true => ok(&shell(&format!("{UBTRFS} umount {at}"))),
        false => assert!(String::from_utf8_lossy(&hard.stderr).contains("10485760 bytes"), "{hard:?}"),
    }
    ok(&shell(&format!("ulimit -S -f 10240; exec {UBTRFS} mount {path} {at}")));
    let content = vec![7; 100 << 20];
    fs::write(dir.path().join("a"), &content).unwrap();
    ok(&shell(&format!("{UBTRFS} sync {at}")));
    assert!(fs::read(dir.path().join("a")).unwrap() == content);
    ok(&shell(&format!("{UBTRFS} umount {at}")));
    btrfs_check(image.path()).unwrap();
}
