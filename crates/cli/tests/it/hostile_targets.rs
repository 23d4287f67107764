//! Files that root writes below the mount of a hostile user (`hostile_server`), whose names lead to files of root: no
//! command follows them.

use std::path::Path;
use std::process::Stdio;

use tempfile::TempDir;

use crate::common::{command, ok, text, ubtrfs};
use crate::hostile_server::scene;

/// Commands that write a file or a directory; `{}` stands for the path.
const WRITERS: &[&str] = &[
    "send -q -f {} IMAGE:/r",
    "export -f {} IMAGE:/d",
    "cp IMAGE:/d/f {}",
    "cp -r IMAGE:/d {}",
    "import --create 128M TAR {}",
    "mkfs -b 128M {}",
    "mount --timeline {} IMAGE HERE",
    "mount --create 128M {} HERE",
];

#[test]
fn nothing_is_written_through_a_link_of_a_hostile_mount() {
    let Some((victims, _listener, mount)) = scene() else { return };
    let scratch = TempDir::with_prefix("ubtrfs-writers-").unwrap();
    let at = |name: &str| text(&scratch.path().join(name));
    std::fs::create_dir(at("here")).unwrap();
    std::fs::create_dir(at("d")).unwrap();
    std::fs::write(at("d/f"), "text").unwrap();
    let run = |words: &[&str]| ok(ubtrfs(words));
    run(&["mkfs", "-q", "-b", "128M", &at("image")]);
    run(&["cp", "-r", &at("d"), &format!("{}:/d", at("image"))]);
    run(&["subvolume", "create", &format!("{}:/s", at("image"))]);
    run(&["subvolume", "snapshot", "-r", &format!("{}:/s", at("image")), &format!("{}:/r", at("image"))]);
    run(&["export", "-f", &at("tar"), &format!("{}:/d", at("image"))]);
    let before = victims.state();
    for line in WRITERS {
        for name in ["link", "dirlink", "dirlink/new", "dirlink/other", "flip", "image", "dir/../../../etc/ubtrfs-new"]
        {
            let path = format!("{}/{name}", mount.dir.path().display());
            let fill = |word: &str| {
                let word = word.replace("IMAGE", &at("image")).replace("HERE", &at("here")).replace("TAR", &at("tar"));
                word.replace("{}", &path)
            };
            let output = command(line.split(' ').map(fill)).stdin(Stdio::null()).output().unwrap();
            let shown = format!("{line} on {name}: {output:?}");
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(victims.state(), before, "{shown}");
            if name != "flip" {
                assert!(!output.status.success() && stderr.matches("ubtrfs: ").count() == 1, "{shown}");
                // Before that, `cp -r` sees that its target is no directory.
                let says_whose = stderr.contains("a mount of ");
                assert!(says_whose || line.starts_with("cp -r") && !name.ends_with("new"), "{shown}");
            }
            if output.status.success() && line.contains("HERE") {
                run(&["umount", &at("here")]);
            }
        }
    }
    assert!(!Path::new("/etc/ubtrfs-new").exists());
    // A file of the mount itself is written.
    let file = format!("{}/file", mount.dir.path().display());
    run(&["send", "-q", "-f", &file, &format!("{}:/r", at("image"))]);
}
