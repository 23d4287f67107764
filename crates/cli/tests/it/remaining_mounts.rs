//! Tests of what the commands that end a mount promise while something still uses the filesystem. In each case, the
//! server is killed at once after the command returns, and the image must hold what was promised.
//!
//! | in use by                | command                | status | at return                                             |
//! |--------------------------|------------------------|--------|-------------------------------------------------------|
//! | nothing                  | `ubtrfs umount`        | 0      | committed, the server has ended                       |
//! | a bind mount             | `ubtrfs umount [-l]`   | 1      | committed; the message names the bind mount           |
//! | a hidden bind mount      | `ubtrfs umount`        | 1      | unmounted; the message says that nothing is committed |
//! | another mount namespace  | `ubtrfs umount`        | 1      | committed; the message names a process                |
//! | a lazily detached mount  | `ubtrfs umount`        | 1      | committed; the message names a process                |
//! | a working directory      | `ubtrfs umount`        | 1      | busy, nothing changed                                 |
//! | a working directory      | `ubtrfs umount -l`     | 0      | committed, the server has ended: it waits for that    |
//! | a bind mount             | umount(8) [-l]         | 0      | unmounted; the kernel tells the server nothing        |
//! | a working directory      | umount(8) -l           | 0      | unmounted; the kernel tells the server nothing        |
//! | a bind mount             | SIGTERM to the server  |        | it detaches all mounts, commits, and ends             |
//! | a working directory      | SIGTERM to the server  |        | it detaches and commits at once, and ends when unused |
//!
//! After umount(8), the server commits by itself soon after the last change (A1 of `fuse/src/activity.rs`).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::{btrfs_check, capability, run};

use crate::common::{namespace, ok, refused, text, ubtrfs};

/// A mounted image and a second directory, in which tests mount a part of it.
struct Scene {
    scratch: TempDir,
}

impl Scene {
    /// Makes and mounts an image that has the directory `h`; `None` if this is impossible here.
    fn new(options: &[&str]) -> Option<Self> {
        if !capability::fuse() || !rustix::process::geteuid().is_root() {
            return None;
        }
        let scene = Self { scratch: TempDir::with_prefix("ubtrfs-remaining-").unwrap() };
        for name in ["m", "m2"] {
            std::fs::create_dir(scene.path(name)).unwrap();
        }
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", &text(&scene.image())]));
        let mut words = vec!["mount".to_owned()];
        words.extend(options.iter().map(|&option| option.to_owned()));
        words.extend([text(&scene.image()), text(&scene.path("m"))]);
        ok(ubtrfs(words));
        std::fs::create_dir(scene.path("m/h")).unwrap();
        ok(ubtrfs(["sync", &text(&scene.path("m"))]));
        Some(scene)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("e.img")
    }

    fn server(&self) -> u32 {
        crate::common::server_of(&self.path("m"))
    }

    fn bind(&self) {
        run("mount", ["--bind", &text(&self.path("m/h")), &text(&self.path("m2"))]).unwrap();
    }

    fn umount(&self, options: &[&str]) -> Output {
        let dir = text(&self.path("m"));
        ubtrfs([&["umount"], options, &[&*dir]].concat())
    }

    fn write(&self, name: &str) {
        std::fs::write(self.path(name), b"content").unwrap();
    }

    /// Whether something is mounted on a directory.
    fn is_mounted(&self, name: &str) -> bool {
        // Other mounts may have names that are not UTF-8.
        let table = std::fs::read("/proc/self/mounts").unwrap();
        String::from_utf8_lossy(&table).lines().any(|line| line.split(' ').nth(1) == Some(&*text(&self.path(name))))
    }

    /// Kills the server, as a crash would, and returns the file `h/f` as the image has it. Fails if the image is
    /// damaged.
    fn content_after_kill(&self, server: u32) -> String {
        run("kill", ["-9", &server.to_string()]).unwrap();
        self.content()
    }

    /// The file `h/f` of the image, once no server has the image open.
    fn content(&self) -> String {
        let file = format!("{}:/h/f", text(&self.image()));
        let begun = Instant::now();
        loop {
            let shown = ubtrfs(["cat", &file]);
            let said = String::from_utf8_lossy(&shown.stderr).into_owned();
            if !said.contains("in use") {
                btrfs_check(&self.image()).unwrap();
                return String::from_utf8_lossy(&shown.stdout).into_owned() + &said;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the server ends: {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let mut found = true;
        while found {
            found = ["m", "m2"]
                .map(|name| self.path(name))
                .iter()
                .any(|dir| rustix::mount::unmount(dir, rustix::mount::UnmountFlags::DETACH).is_ok());
        }
    }
}

/// A shell whose working directory is `dir`. It ends when its input is closed.
fn shell_in(dir: &Path) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "echo; read end"]).current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = command.spawn().unwrap();
    BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    shell
}

fn end(mut shell: Child) {
    drop(shell.stdin.take());
    shell.wait().unwrap();
}

#[test]
fn umount_commits_although_a_bind_mount_remains_and_names_it() {
    for options in [&[][..], &["-l"]] {
        let Some(scene) = Scene::new(&[]) else { return };
        scene.bind();
        scene.write("m/h/f");
        let server = scene.server();
        let output = scene.umount(options);
        let content = scene.content_after_kill(server);
        let at = text(&scene.path("m2"));
        let remedy = format!("ubtrfs umount {at}");
        refused(&output, &["is unmounted", "on disk", "still mounted", &at, &remedy]);
        assert!(!scene.is_mounted("m"));
        assert_eq!(content, "content");
    }
}

/// Stores to a mapping reach the server only when the kernel hands over its pages.
#[test]
fn umount_commits_the_pages_of_a_mapping_although_a_bind_mount_remains() {
    if !capability::program("python3") {
        return;
    }
    const MAP: &str = "import mmap, os, sys, time\n\
                       fd = os.open('f', os.O_CREAT | os.O_RDWR)\n\
                       os.ftruncate(fd, 7)\n\
                       mapped = mmap.mmap(fd, 7)\n\
                       mapped[:] = b'content'\n\
                       print(flush=True)\n\
                       sys.stdin.read()\n";
    let Some(scene) = Scene::new(&[]) else { return };
    scene.bind();
    let mut command = Command::new("python3");
    command.args(["-c", MAP]).current_dir(scene.path("m2")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut mapper = command.spawn().unwrap();
    BufReader::new(mapper.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let server = scene.server();
    let output = scene.umount(&[]);
    let content = scene.content_after_kill(server);
    end(mapper);
    refused(&output, &["is unmounted", "on disk", "still mounted"]);
    assert_eq!(content, "content");
}

#[test]
fn umount_of_a_bind_mount_commits_and_names_the_mount() {
    let Some(scene) = Scene::new(&[]) else { return };
    scene.bind();
    scene.write("m2/f");
    let server = scene.server();
    let output = ubtrfs(["umount", &text(&scene.path("m2"))]);
    let content = scene.content_after_kill(server);
    refused(&output, &["is unmounted", "on disk", "still mounted", &text(&scene.path("m"))]);
    assert_eq!(content, "content");
}

/// A mount that another one covers cannot be entered. The server is asked through a copy of the unmounted mount.
#[test]
fn umount_commits_although_the_remaining_mount_is_hidden() {
    let Some(scene) = Scene::new(&[]) else { return };
    scene.bind();
    run("mount", ["-t", "tmpfs", "none", &text(&scene.path("m2"))]).unwrap();
    scene.write("m/h/f");
    let server = scene.server();
    let output = scene.umount(&[]);
    let content = scene.content_after_kill(server);
    refused(&output, &["is unmounted", "on disk", &text(&scene.path("m2"))]);
    assert_eq!(content, "content");
}

#[test]
fn umount_commits_although_the_mount_remains_in_another_namespace() {
    let Some(scene) = Scene::new(&[]) else { return };
    let mut other = namespace(scene.scratch.path());
    other.args(["sh", "-c", "echo; while read word; do echo content > $word; echo; done"]);
    let mut other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(other.stdout.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    let server = scene.server();
    // Changes go on after the unmount, until the command looks for other namespaces.
    let output = std::thread::scope(|scope| {
        let umount = scope.spawn(|| scene.umount(&[]));
        let begun = Instant::now();
        while scene.is_mounted("m") {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
        use std::io::Write;
        let input = other.stdin.as_mut().unwrap();
        let until = Instant::now() + Duration::from_millis(1500);
        while Instant::now() < until {
            writeln!(input, "{}", text(&scene.path("m/h/f"))).unwrap();
            said.read_line(&mut String::new()).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
        umount.join().unwrap()
    });
    let content = scene.content_after_kill(server);
    end(other);
    refused(&output, &["is unmounted, but", "in another mount namespace", "on disk", "kill"]);
    assert_eq!(content, "content\n");
}

#[test]
fn umount_of_a_read_only_filesystem_promises_no_later_commit() {
    let Some(scene) = Scene::new(&[]) else { return };
    let mut other = namespace(scene.scratch.path());
    let mut other =
        other.args(["sh", "-c", "echo; read end"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(other.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    std::fs::write(scene.path("m/h/f"), "content").unwrap();
    std::fs::remove_file(scene.image()).unwrap();
    refused(&ubtrfs(["sync".to_owned(), text(&scene.path("m"))]), &["the image was removed"]);
    let output = scene.umount(&[]);
    end(other);
    refused(
        &output,
        &["is unmounted, but its last changes may be lost", "the image was removed", "another mount namespace"],
    );
}

#[test]
fn umount_commits_although_a_process_is_left_in_a_mount_that_was_detached() {
    let Some(scene) = Scene::new(&[]) else { return };
    scene.bind();
    let shell = shell_in(&scene.path("m2"));
    run("umount", ["-l", &text(&scene.path("m2"))]).unwrap();
    scene.write("m/h/f");
    let server = scene.server();
    let output = scene.umount(&[]);
    let process = format!("process {} (sh)", shell.id());
    let content = scene.content_after_kill(server);
    end(shell);
    refused(&output, &["is unmounted, but", &process, "on disk"]);
    assert_eq!(content, "content");
}

#[test]
fn a_busy_mount_stays_mounted_until_umount_is_lazy_and_then_is_waited_for() {
    let Some(scene) = Scene::new(&[]) else { return };
    let shell = shell_in(&scene.path("m/h"));
    scene.write("m/h/f");
    refused(&scene.umount(&[]), &["is busy"]);
    assert!(scene.is_mounted("m"));
    let server = scene.server();
    std::thread::scope(|scope| {
        let umount = scope.spawn(|| scene.umount(&["-l"]));
        let begun = Instant::now();
        while scene.is_mounted("m") {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!umount.is_finished(), "it waits while the directory is in use");
        end(shell);
        ok(umount.join().unwrap());
    });
    let begun = Instant::now();
    while Path::new(&format!("/proc/{server}/exe")).exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the server ends");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(scene.content(), "content");
}

#[test]
fn plain_umount_leaves_the_server_to_the_bind_mount() {
    let Some(scene) = Scene::new(&[]) else { return };
    scene.bind();
    scene.write("m/h/f");
    run("umount", [&text(&scene.path("m"))]).unwrap();
    assert_eq!(std::fs::read(scene.path("m2/f")).unwrap(), b"content");
    ok(ubtrfs(["umount", &text(&scene.path("m2"))]));
    assert_eq!(scene.content(), "content");
}

/// umount(8) promises nothing here, because the kernel does not tell the server. The server commits by itself.
#[test]
fn the_server_commits_by_itself_soon_after_plain_umount() {
    for in_use_by_a_shell in [false, true] {
        let Some(scene) = Scene::new(&[]) else { return };
        let shell = in_use_by_a_shell.then(|| shell_in(&scene.path("m/h")));
        if shell.is_none() {
            scene.bind();
        }
        let (server, before) = (scene.server(), nr_commits(&scene.image()));
        scene.write("m/h/f");
        run("umount", ["-l", &text(&scene.path("m"))]).unwrap();
        let begun = Instant::now();
        while nr_commits(&scene.image()) == before {
            assert!(begun.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(scene.content_after_kill(server), "content");
        if let Some(shell) = shell {
            end(shell);
        }
    }
}

#[test]
fn sigterm_detaches_bind_mounts_too_and_commits() {
    for options in [&[][..], &["--sandbox"]] {
        let Some(scene) = Scene::new(options) else { return };
        scene.bind();
        scene.write("m/h/f");
        run("kill", [&scene.server().to_string()]).unwrap();
        assert_eq!(scene.content(), "content", "{options:?}");
        assert!(!scene.is_mounted("m") && !scene.is_mounted("m2"), "{options:?}");
    }
}

#[test]
fn sigterm_commits_at_once_although_a_process_uses_the_mount() {
    for options in [&[][..], &["--sandbox"]] {
        let Some(scene) = Scene::new(options) else { return };
        // Changes that go on keep the server from committing by itself before 30 s have passed.
        let writes = "while echo x > busy; do sleep 0.1; done";
        let mut writer = Command::new("sh").args(["-c", writes]).current_dir(scene.path("m/h")).spawn().unwrap();
        let server = scene.server();
        let commits = || nr_commits(&scene.image());
        let before = commits();
        scene.write("m/h/f");
        run("kill", [&server.to_string()]).unwrap();
        let begun = Instant::now();
        while scene.is_mounted("m") || commits() == before {
            assert!(begun.elapsed() < Duration::from_secs(20), "{options:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(scene.content_after_kill(server), "content", "{options:?}");
        let _ = writer.kill();
        writer.wait().unwrap();
    }
}

/// The generation of the image's first superblock.
fn nr_commits(image: &Path) -> u64 {
    use std::os::unix::fs::FileExt;
    let mut generation = [0; 8];
    std::fs::File::open(image).unwrap().read_exact_at(&mut generation, (64 << 10) + 72).unwrap();
    u64::from_le_bytes(generation)
}
