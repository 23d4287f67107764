//! Tests of loop devices that are attached to an image while ubtrfs has it mounted. If the kernel mounted such a device,
//! too, both would overwrite each other's blocks.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::{btrfs_check, capability};

use crate::common::{ok, refused, text, ubtrfs};

/// An image that a server in the foreground has mounted.
struct Mounted {
    scratch: TempDir,
    server: Child,
    /// The lines of the server's log.
    log: Receiver<String>,
}

impl Mounted {
    fn new() -> Option<Self> {
        if !capability::fuse() || !capability::kernel_oracle() || !capability::program("losetup") {
            return None;
        }
        let scratch = TempDir::with_prefix("ubtrfs-loop-").unwrap();
        let path = |name: &str| text(&scratch.path().join(name));
        for name in ["m", "linux"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", &path("e.img")]));
        let mut server = crate::common::command(["mount", "-f", &path("e.img"), &path("m")]);
        let mut server = server.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(server.stderr.take().unwrap()).lines();
        let (send, log) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        let begun = Instant::now();
        while !ubtrfs(["sync", &path("m")]).status.success() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Self { scratch, server, log })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn image(&self) -> String {
        text(&self.path("e.img"))
    }

    /// The next line of the server's log.
    fn told(&self) -> String {
        self.log.recv_timeout(Duration::from_secs(20)).expect("the server says something at once")
    }

    fn umount(&mut self) -> Output {
        let output = ubtrfs(["umount", &text(&self.path("m"))]);
        self.server.wait().unwrap();
        output
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for name in ["linux", "m"] {
            let _ = rustix::mount::unmount(self.path(name), rustix::mount::UnmountFlags::DETACH);
        }
        let _ = self.server.wait();
    }
}

fn linux(words: &[&str]) -> Output {
    Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output().unwrap()
}

/// Whether a loop device has the image as its file.
fn has_loop_device(image: &Path) -> bool {
    !ok(linux(&["losetup", "-j", &text(image)])).is_empty()
}

#[test]
fn a_loop_device_over_a_mounted_image_is_claimed_and_told_of_at_once() {
    let Some(mut mounted) = Mounted::new() else { return };
    let node = ok(linux(&["losetup", "-f", "--show", &mounted.image()])).trim().to_owned();
    let line = mounted.told();
    assert!(line.contains(&node) && line.contains("losetup -d"), "{line}");
    let at = text(&mounted.path("linux"));
    for words in [&["mount", &*node, &*at][..], &["mount", "-o", "ro", &*node, &*at]] {
        let refusal = linux(words);
        assert!(!refusal.status.success(), "{words:?}");
        assert!(String::from_utf8_lossy(&refusal.stderr).contains("busy"), "{refusal:?}");
    }
    // Detaching works while the image is mounted.
    ok(linux(&["losetup", "-d", &node]));
    let begun = Instant::now();
    while has_loop_device(&mounted.path("e.img")) {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::write(mounted.path("m/file"), "content").unwrap();
    ok(mounted.umount());
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/file", mounted.image())])), "content");
    btrfs_check(&mounted.path("e.img")).unwrap();
}

#[test]
fn a_loop_device_is_free_when_the_image_is_unmounted() {
    let Some(mut mounted) = Mounted::new() else { return };
    let node = ok(linux(&["losetup", "-f", "--show", &mounted.image()])).trim().to_owned();
    mounted.told();
    ok(mounted.umount());
    let at = text(&mounted.path("linux"));
    ok(linux(&["mount", &node, &at]));
    ok(linux(&["umount", &at]));
    ok(linux(&["losetup", "-d", &node]));
}

/// `mount -o loop` attaches the device and mounts it at once. If the claim comes too late, for example because the server
/// is stopped, the server writes nothing any more.
#[test]
fn linux_and_the_server_do_not_both_write_to_an_image() {
    let (mut nr_refused, mut nr_mounted) = (0, 0);
    for is_stopped in [false, false, true] {
        let Some(mut mounted) = Mounted::new() else { return };
        std::fs::write(mounted.path("m/before"), "content").unwrap();
        ok(ubtrfs(["sync", &text(&mounted.path("m"))]));
        let at = text(&mounted.path("linux"));
        let signal = |name: &str| ok(linux(&["kill", name, &mounted.server.id().to_string()]));
        if is_stopped {
            signal("-STOP");
        }
        let mount = linux(&["mount", "-o", "loop", &mounted.image(), &at]);
        signal("-CONT");
        assert!(mount.status.success() || !is_stopped, "{mount:?}");
        let line = mounted.told();
        if mount.status.success() {
            nr_mounted += 1;
            assert!(line.contains("the kernel has mounted the image") && line.contains("read-only"), "{line}");
            assert!(std::fs::write(mounted.path("m/file"), "content").is_err());
            std::fs::write(mounted.path("linux/file"), "of Linux").unwrap();
            ok(linux(&["umount", &at]));
            refused(&mounted.umount(), &["may be lost", "the kernel has mounted the image"]);
            assert_eq!(ok(ubtrfs(["cat", &format!("{}:/file", mounted.image())])), "of Linux");
        } else {
            nr_refused += 1;
            assert!(line.contains("is claimed"), "{line}");
            std::fs::write(mounted.path("m/file"), "content").unwrap();
            ok(mounted.umount());
            assert_eq!(ok(ubtrfs(["cat", &format!("{}:/file", mounted.image())])), "content");
        }
        assert_eq!(ok(ubtrfs(["cat", &format!("{}:/before", mounted.image())])), "content");
        btrfs_check(&mounted.path("e.img")).unwrap();
    }
    eprintln!("mount -o loop: {nr_refused} refused, {nr_mounted} mounted, with the server read-only");
}

/// Waits until somebody holds a new loop device over the image exclusively.
fn is_claimed(image: &Path) {
    let node = ok(linux(&["losetup", "-f", "--show", &text(image)])).trim().to_owned();
    let flags = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap();
    let begun = Instant::now();
    while std::fs::File::options().read(true).custom_flags(flags).open(&node).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the kernel may mount {}, too", image.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    ok(linux(&["losetup", "-d", &node]));
}

#[test]
fn loop_devices_over_all_images_of_a_mount_are_claimed() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("losetup") {
        return;
    }
    let scratch = TempDir::with_prefix("ubtrfs-loops-").unwrap();
    let path = |name: &str| scratch.path().join(name);
    let at = |name: &str| text(&path(name));
    std::fs::create_dir(path("m")).unwrap();
    for name in ["one.img", "two.img", "three.img", "seed.img", "own.img"] {
        std::fs::File::create(path(name)).unwrap().set_len(256 << 20).unwrap();
    }
    ok(ubtrfs(["mkfs", "-q", "-d", "raid1", "-m", "raid1", &at("one.img"), &at("two.img")]));
    // Named by a relative path; the other device is found.
    ok(crate::common::command(["mount", "one.img", "m"]).current_dir(scratch.path()).output().unwrap());
    is_claimed(&path("one.img"));
    is_claimed(&path("two.img"));
    ok(ubtrfs(["replace", "start", "-B", "1", &at("three.img"), &at("m")]));
    is_claimed(&path("three.img"));
    ok(ubtrfs(["umount", &at("m")]));
    // A filesystem that is made on a mounted seed.
    ok(ubtrfs(["mkfs", "-q", &at("seed.img")]));
    ok(ubtrfs(["tune", "-S", "1", &at("seed.img")]));
    assert!(ubtrfs(["mount", &at("seed.img"), &at("m")]).status.success());
    ok(ubtrfs(["device", "add", &at("own.img"), &at("m")]));
    is_claimed(&path("own.img"));
    ok(ubtrfs(["umount", &at("m")]));
    assert!(ok(ubtrfs(["check", &at("own.img")])).contains(": clean"));
}

/// A confined server cannot open loop devices. At a terminal, `ubtrfs mount` says so. Elsewhere it says nothing, because
/// programs take output of a successful mount for an error.
#[test]
fn a_mount_with_a_sandbox_says_at_a_terminal_that_it_claims_no_loop_devices() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("script") {
        return;
    }
    let scratch = TempDir::with_prefix("ubtrfs-loops-").unwrap();
    let [image, dir] = ["e.img", "m"].map(|name| text(&scratch.path().join(name)));
    std::fs::create_dir(&dir).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &image]));
    let at_terminal = |options: &str| {
        let line = format!("{} mount {options} {image} {dir}", env!("CARGO_BIN_EXE_ubtrfs"));
        let told = ok(linux(&["script", "-qec", &line, "/dev/null"]));
        ok(ubtrfs(["umount", &dir]));
        told
    };
    let told = at_terminal("--sandbox");
    assert!(told.contains("cannot claim loop devices") && told.trim().lines().count() == 1, "{told}");
    for options in ["--sandbox -o ro", "--no-sandbox"] {
        let told = at_terminal(options);
        assert!(!told.contains("loop"), "{options}: {told}");
    }
    ok(ubtrfs(["mount", "--sandbox", &image, &dir]));
    ok(ubtrfs(["umount", &dir]));
}
