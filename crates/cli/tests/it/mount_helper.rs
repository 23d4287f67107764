//! Tests of the program as the helper of mount(8), which passes the options of a line of fstab to it.
//!
//! Method: a shell with the name and the options of mount(8) runs the helper, because mount(8) looks for helpers only in
//! the system's folders.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

use crate::common::{ok, refused, text, ubtrfs};

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
