//! Clients of a mount's control socket that stop halfway, or send what never answers: the server ends all the same, by
//! `ubtrfs umount` and by SIGTERM, and leaves no process behind.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_device::{Access, FileDevice};
use ubtrfs_testkit::{btrfs_check, capability};

use crate::common::{command, ok, refused, text, ubtrfs};

/// A program that says in lines how far it is.
struct Program(Child);

impl Program {
    /// Starts a program of `programs` as a user.
    fn start(user: u32, name: &str, args: &[&str]) -> Self {
        let path = format!("{}/tests/it/programs/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "/usr/bin/python3"]);
        Self(command.arg(path).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn awaits(&mut self, word: &str) {
        let mut line = String::new();
        BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), word);
    }

    fn goes_on(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mount with many files, whose server is a child of this process.
struct Mount {
    dir: TempDir,
    server: Child,
}

impl Mount {
    fn make(options: &[&str]) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-hostile-client-").unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for name in ["at", "silent"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let (image, at) = (text(&dir.path().join("image")), dir.path().join("at"));
        let words = ["mount", "--foreground", "-o", "allow_other", "--create", "256M"];
        let server = command(words.iter().chain(options).chain([&image.as_str(), &text(&at).as_str()]));
        let server = { server }.spawn().unwrap();
        let begun = Instant::now();
        while rustix::fs::getxattr(&at, "ubtrfs.control", &mut [0; 256]).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(20));
        }
        for nr in 0..4000 {
            std::fs::write(at.join(format!("{nr:0>200}")), b"").unwrap();
        }
        Self { dir, server }
    }

    fn path(&self) -> String {
        text(&self.dir.path().join("at"))
    }

    /// Ends the server in one of two ways, and fails if that takes long.
    fn ends(&mut self, by_signal: bool, shown: &str) {
        let begun = Instant::now();
        if by_signal {
            let pid = rustix::process::Pid::from_child(&self.server);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        } else {
            ok(ubtrfs(["umount", &self.path()]));
        }
        while self.server.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(15), "{shown}: the server still runs");
            std::thread::sleep(Duration::from_millis(20));
        }
        btrfs_check(&self.dir.path().join("image")).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
        let _ = self.server.wait();
    }
}

fn is_possible() -> bool {
    capability::root() && capability::fuse() && capability::kernel_oracle() && capability::program("setpriv")
}

/// How the server is started and ended.
const WAYS: [(&[&str], bool); 4] = [(&[], false), (&[], true), (&["--sandbox"], false), (&["--sandbox"], true)];

#[test]
fn clients_that_stop_in_a_stream_do_not_hold_up_the_end_of_a_mount() {
    if !is_possible() {
        return;
    }
    for (options, by_signal) in WAYS {
        let shown = format!("{options:?}, by signal: {by_signal}");
        let mut mount = Mount::make(options);
        let mut manners = vec![(65534, "stops_reading"), (65534, "sends_its_pipe")];
        if by_signal {
            // A command of root keeps the mount busy.
            manners.extend([(0, "stops_sending"), (0, "stops_reading"), (0, "sends_its_pipe")]);
        }
        let start = |(user, manner)| Program::start(user, "hostile_client.py", &[manner, &mount.path()]);
        let mut clients: Vec<_> = manners.into_iter().map(start).collect();
        clients.iter_mut().for_each(|client| client.awaits("ready"));
        mount.ends(by_signal, &shown);
    }
}

#[test]
fn a_file_of_a_silent_server_leaves_no_process_behind() {
    if !is_possible() {
        return;
    }
    for (options, by_signal) in WAYS {
        let mut mount = Mount::make(options);
        let silent = text(&mount.dir.path().join("silent"));
        let _unmounted = Unmounted(silent.clone());
        let mut server = Program::start(0, "silent_fuse.py", &[&silent, "65534"]);
        server.awaits("mounted");
        let file = format!("{silent}/file");
        let mut client = Program::start(65534, "hostile_client.py", &["sends_a_silent_file", &mount.path(), &file]);
        client.awaits("opened");
        drop(server.0.stdin.take());
        server.awaits("silent");
        client.goes_on();
        client.awaits("ready");
        // Dropped first, so that nothing waits for it if the test fails.
        let _server = server;
        mount.ends(by_signal, &format!("{options:?}, by signal: {by_signal}"));
    }
}

/// The message names the mount of an image by the table of mounts: another mount may have a server that never answers.
#[test]
fn an_image_in_use_is_told_although_a_mount_is_silent() {
    if !is_possible() {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-silent-").unwrap();
    let (image, silent) = (dir.path().join("image"), text(&dir.path().join("silent")));
    std::fs::create_dir(&silent).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "128M", &text(&image)]));
    let _held = FileDevice::open(&image, Access::ReadWrite).unwrap();
    let _unmounted = Unmounted(silent.clone());
    let mut server = Program::start(0, "silent_fuse.py", &[&silent, "0", "fuse.ubtrfs"]);
    server.awaits("mounted");
    drop(server.0.stdin.take());
    server.awaits("silent");
    let mut command = command(["ls", &text(&image)]);
    let mut command = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    let mut ended = None;
    while ended.is_none() && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
        ended = command.try_wait().unwrap();
    }
    // A command that waits for the server goes on when the server has ended.
    drop(server);
    let output = command.wait_with_output().unwrap();
    assert!(ended.is_some(), "it waited for a server that has nothing to do with the image");
    refused(&output, &["in use"]);
}

/// A place that is unmounted at the end.
struct Unmounted(String);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}
