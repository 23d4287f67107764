//! Tests of the program as the helper of mount(8), which passes the options of a line of fstab to it.
//!
//! Method: a shell with the name and the options of mount(8) runs the helper, because mount(8) looks for helpers only in
//! the system's folders.

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_testkit::capability;

use crate::common::{command, ok, refused, text, ubtrfs};

/// A folder with the helper, an image and a mount point.
struct Scene(TempDir);

impl Scene {
    fn new() -> Option<Self> {
        if !capability::root() || !capability::fuse() || !capability::program("bash") {
            return None;
        }
        let scene = Self(TempDir::with_prefix("ubtrfs-helper-").unwrap());
        symlink(env!("CARGO_BIN_EXE_ubtrfs"), scene.0.path().join("mount.btrfs")).unwrap();
        std::fs::create_dir(scene.0.path().join("m")).unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "128M", &scene.at("a.img")]));
        Some(scene)
    }

    fn at(&self, name: &str) -> String {
        text(&self.0.path().join(name))
    }

    /// Calls the helper as mount(8) does for `mount MOUNT_OPTION DEVICE DIR -o OPTIONS`.
    fn by_mount(&self, option: &str, device: &str, dir: &str, options: &str) -> Output {
        let mut command = Command::new("bash");
        command.args(["-c", &format!(r#"exec -a mount sh {option} -c '"$@"; exit $?' sh "$@""#), "bash"]);
        command.args([&self.at("mount.btrfs"), &self.at(device), &self.at(dir), "-o", options]);
        command.env("LC_ALL", "C").stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = ubtrfs(["umount", &self.at("m")]);
    }
}

#[test]
fn a_line_with_nofail_is_passed_over_only_if_its_device_is_absent() {
    let Some(scene) = Scene::new() else { return };
    symlink("nowhere", scene.at("dangling")).unwrap();
    for device in ["absent", "a.img/absent", "dangling"] {
        for option in ["-a", ""] {
            let output = scene.by_mount(option, device, "m", "rw,nofail");
            assert_eq!(ok(&output), "", "{device}");
            assert!(output.stderr.is_empty(), "{output:?}");
        }
        assert_eq!(scene.by_mount("-a", device, "m", "rw").status.code(), Some(32), "{device}");
    }
    // As mount(8) does for other types, the directory is looked at first.
    assert_eq!(scene.by_mount("-a", "absent", "absent", "nofail").status.code(), Some(32));
    let text = "not a btrfs".repeat(50_000);
    std::fs::write(Path::new(&scene.at("text")), text).unwrap();
    assert_eq!(scene.by_mount("-a", "text", "m", "nofail").status.code(), Some(32));
    // Anybody else is told.
    refused(&ubtrfs(["mount", "-o", "nofail", &scene.at("absent"), &scene.at("m")]), &["absent"]);
    ok(scene.by_mount("-a", "a.img", "m", "nofail"));
    std::fs::write(scene.at("m/file"), "text").unwrap();
}

#[test]
fn flags_of_the_kernel_and_notes_of_mount_are_taken() {
    let Some(scene) = Scene::new() else { return };
    ok(scene.by_mount("", "a.img", "m", "rw,nosymfollow,sync,user=me,uhelper=x"));
    std::fs::write(scene.at("m/file"), "text").unwrap();
    symlink("file", scene.at("m/link")).unwrap();
    let read = || std::fs::read_to_string(scene.at("m/link")).map_err(|error| error.raw_os_error());
    assert_eq!(read(), Err(Some(Errno::LOOP.raw_os_error())), "nosymfollow");
    let options = || {
        let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let line = table.lines().find(|line| line.contains(&scene.at("m"))).unwrap().to_owned();
        ["sync", "nosymfollow"].map(|option| line.split([' ', ',']).any(|word| word == option))
    };
    assert_eq!(options(), [true, true]);
    ok(scene.by_mount("", "a.img", "m", "remount,rw,symfollow,async"));
    assert_eq!((options(), read().unwrap().as_str()), ([false, false], "text"));
    ok(ubtrfs(["umount", &scene.at("m")]));
    // Another mount of the filesystem has a flag of its own, but shares `sync`.
    ok(ubtrfs(["mount", "-o", "sync", &scene.at("a.img"), &scene.at("m")]));
    std::fs::create_dir(scene.at("n")).unwrap();
    refused(&ubtrfs(["mount", "-o", "async", &scene.at("a.img"), &scene.at("n")]), &["async", "share"]);
    ok(ubtrfs(["mount", "-o", "nosymfollow", &scene.at("a.img"), &scene.at("n")]));
    assert_eq!(std::fs::read_link(scene.at("n/link")).unwrap(), Path::new("file"));
    assert_eq!(std::fs::read(scene.at("n/link")).unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
    assert_eq!(read().unwrap(), "text");
    ok(ubtrfs(["umount", &scene.at("n")]));
    if !std::fs::read_to_string("/proc/filesystems").unwrap().contains("selinuxfs") {
        let context = "context=system_u:object_r:tmp_t:s0";
        let output = ubtrfs(["mount", "-o", context, &scene.at("a.img"), &scene.at("n")]);
        refused(&output, &[context, "SELinux"]);
    }
}

#[test]
fn with_sync_a_write_is_durable_when_it_returns() {
    let Some(scene) = Scene::new() else { return };
    for (options, is_durable) in [("sync,commit=300", true), ("commit=300", false)] {
        let [image, dir] = ["a.img", "m"].map(|name| scene.at(name));
        let mut server = command(["mount", "-f", "-o", options, &image, &dir]).spawn().unwrap();
        let is_mounted = || std::fs::metadata(&dir).is_ok_and(|meta| meta.ino() == 256);
        while !is_mounted() {
            std::thread::sleep(Duration::from_millis(20));
            assert!(server.try_wait().unwrap().is_none(), "the server has ended");
        }
        std::fs::write(scene.at("m/new"), options).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        // Fails, because the last changes may be lost.
        ubtrfs(["umount", "-l", &dir]);
        let found = ubtrfs(["cat", &format!("{image}:/new")]);
        assert_eq!(found.status.success() && found.stdout == options.as_bytes(), is_durable, "{options}: {found:?}");
    }
}
