//! Runs the script `quickstart` and then the commands that it prints, in their order, as a newcomer types them.
//!
//! The script builds nothing here: a program `cargo` that does nothing stands in for it, and `sudo` runs its arguments.
//! Everything runs in a mount namespace of its own, because one command mounts on /mnt.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::{btrfs_check, capability};

use crate::common::namespace;

/// Types the printed commands, and fails at the first that fails.
const TYPE_THEM: &str = r#"
./quickstart > printed || exit 1
grep '^  ' printed > commands
while read -r line <&3; do
    echo "+ $line" >> typed
    sh -c "$line" > output 2>&1 || { echo "$line:"; cat output; exit 1; }
done 3< commands
"#;

#[test]
fn the_commands_that_quickstart_prints_work_in_the_printed_order() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("unshare") {
        return;
    }
    let scratch = TempDir::with_prefix("ubtrfs-quickstart-").unwrap();
    let at = |name: &str| scratch.path().join(name);
    for dir in ["target/release", "crates/some", "bin"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    std::fs::write(at("crates/some/file"), "text").unwrap();
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../quickstart"), at("quickstart")).unwrap();
    symlink(env!("CARGO_BIN_EXE_ubtrfs"), at("target/release/ubtrfs")).unwrap();
    for (name, script) in [("cargo", "#!/bin/sh\n"), ("sudo", "#!/bin/sh\nexec \"$@\"\n")] {
        std::fs::write(at("bin").join(name), script).unwrap();
        std::fs::set_permissions(at("bin").join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", at("bin").display(), std::env::var("PATH").unwrap());
    let mut command = namespace(scratch.path());
    command.args(["timeout", "120", "sh", "-c", TYPE_THEM]);
    let output = command.env("PATH", path).current_dir(scratch.path()).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let typed = std::fs::read_to_string(at("typed")).unwrap_or_default();
    let _ = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).arg("umount").arg(at("demo")).output();
    assert!(output.status.success(), "{typed}{said}");
    // Unmounting comes before every command that opens the image.
    for word in ["umount demo", "ls demo.img:/", "sudo mount -o loop demo.img", "mount -o compress"] {
        assert!(typed.contains(word), "{word}: {typed}");
    }
    btrfs_check(&at("demo.img")).unwrap();
}
