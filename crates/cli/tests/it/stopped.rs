//! Tests of commands on a mount, and on an image that another process has open, while that process is stopped (SIGSTOP).
//!
//! Method: each command must end by itself, name the process, and leave nothing that takes effect later. It works when the
//! process continues.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::{btrfs_check, capability, run as sh};

use crate::common::{ok, refused, server_of, text, ubtrfs};

/// Stops a process, and continues it when dropped.
struct Stopped(u32);

impl Stopped {
    fn new(pid: u32) -> Self {
        let stopped = Self(pid);
        sh("kill", ["-STOP", &pid.to_string()]).unwrap();
        let threads = || fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let state = |stat: String| stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
        eventually("the process stops", || {
            threads().all(|thread| state(fs::read_to_string(thread.path().join("stat")).unwrap()) == Some('T'))
        });
        stopped
    }

    /// Fails unless the command ends by itself and names the process. A command that waits for the process cannot be
    /// killed, but it goes on when a failed test continues the process.
    #[track_caller]
    fn refuses(&self, dir: &Path, line: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command
            .args(line.split(' '))
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut command = command.spawn().unwrap();
        eventually(line, || command.try_wait().unwrap().is_some());
        let output = command.wait_with_output().unwrap();
        let stderr = stderr(&output);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{line}: {output:?}");
        let advice = format!(
            "process {0} (ubtrfs) does not answer, because it is stopped; continue it with: kill -CONT {0}",
            self.0
        );
        assert!(stderr.contains(&advice), "{line}: {stderr}");
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = sh("kill", ["-CONT", &self.0.to_string()]);
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn no_command_enters_a_mount_whose_server_is_stopped() {
    if !capability::fuse() {
        return;
    }
    for options in ["commit=300", "noio_uring"] {
        let dir = TempDir::new().unwrap();
        let at = dir.path().join("mnt");
        let image = text(&dir.path().join("a.img"));
        fs::create_dir(&at).unwrap();
        symlink("mnt/d", dir.path().join("link")).unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "1G", &image]));
        ok(ubtrfs(["mount", "-o", options, &image, &text(&at)]));
        fs::create_dir(at.join("d")).unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "128M", &text(&at.join("d/inner.img"))]));
        let stopped = Stopped::new(server_of(&at));
        for line in [
            "balance status mnt",
            "balance start --full-balance mnt",
            "filesystem usage link",
            "filesystem df mnt/d/../d",
            "filesystem resize cancel mnt",
            "subvolume list mnt",
            "subvolume create mnt/s",
            "subvolume delete mnt/s",
            "sync mnt/d",
            "stats mnt",
            "ls link/inner.img:/",
            "check link/inner.img",
            "mount a.img mnt",
            "mount -o remount,ro a.img mnt",
            "umount mnt",
        ] {
            stopped.refuses(dir.path(), line);
        }
        drop(stopped);
        assert_eq!(ok(ubtrfs(["subvolume", "list", &text(&at)])), "");
        ok(ubtrfs(["filesystem", "usage", &text(&dir.path().join("link"))]));
        ok(ubtrfs(["ls", &format!("{}:/", text(&at.join("d/inner.img")))]));
        ok(ubtrfs(["umount", &text(&at)]));
    }
}

#[test]
fn a_resize_of_an_image_is_cancelled_and_is_not_waited_for_while_it_is_stopped() {
    let dir = TempDir::new().unwrap();
    let image = text(&dir.path().join("a.img"));
    fs::write(dir.path().join("f"), vec![7; 300 << 20]).unwrap();
    let mut late = Vec::new();
    for _ in 0..5 {
        ok(ubtrfs(["mkfs", "-q", "-f", "-b", "4G", &image]));
        for name in ["f1", "f2", "f3"] {
            ok(ubtrfs(["cp", &text(&dir.path().join("f")), &format!("{image}:/{name}")]));
        }
        // The data of the other files moves to the place of this one.
        ok(ubtrfs(["rm", &format!("{image}:/f1")]));
        let mut resize = crate::common::command(["filesystem", "resize", "900M", &image]);
        let mut resize = resize.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let socket = format!("-{:x}-resize-", fs::metadata(&image).unwrap().ino());
        eventually("the resize begins", || {
            fs::read_to_string("/proc/net/unix").unwrap().contains(&socket) || resize.try_wait().unwrap().is_some()
        });
        std::thread::sleep(Duration::from_millis(10));
        if resize.try_wait().unwrap().is_some() {
            continue;
        }
        let stopped = Stopped::new(resize.id());
        stopped.refuses(dir.path(), "filesystem resize cancel a.img");
        // This command waits a moment for the process, so it is in time when the process continues.
        let mut cancel = crate::common::command(["filesystem", "resize", "cancel", &image]);
        let cancel = cancel.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        drop(stopped);
        let cancel = cancel.wait_with_output().unwrap();
        if cancel.status.success() {
            // When the command returns, the image is free.
            ok(ubtrfs(["filesystem", "df", &image]));
            refused(
                &resize.wait_with_output().unwrap(),
                &["cannot resize", "it was cancelled", "the size is unchanged"],
            );
            btrfs_check(Path::new(&image)).unwrap();
            return;
        }
        late.push(stderr(&cancel));
        resize.wait().unwrap();
    }
    panic!("no command was in time: {late:?}");
}
