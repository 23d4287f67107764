//! Runs the tests with other programs (`scripts/tools/`): backup programs, mount(8) and fstab, image builders, and others.
//!
//! Method: each script gets a folder with the program under the names of btrfs-progs and of mount(8)'s helpers. A script
//! says what it lacks, and is then skipped. `scripts/prepare` installs what the scripts in [`REQUIRED`] need.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

/// Must run in CI.
const REQUIRED: &[&str] =
    &["block-lock", "block-tools", "btrbk", "fstab", "image-builders", "incus", "parallel-mounts", "snapper"];

/// Run where their programs are installed, which CI does not do.
const OPTIONAL: &[&str] = &[
    "backup-programs",
    "btrfsmaintenance",
    "file-programs",
    "grub",
    "image-readers",
    "kiwi",
    "libblockdev",
    "nfs-ganesha",
    "overlay",
    "samba",
    "systemd-repart",
];

/// The exit status of a script that lacks something.
const LACKS: i32 = 77;

const NAMES: &[&str] = &[
    "ubtrfs",
    "btrfs",
    "btrfsck",
    "btrfstune",
    "mkfs.btrfs",
    "mount.btrfs",
    "mount.ubtrfs",
    "mount.fuse.ubtrfs",
    "umount.fuse.ubtrfs",
];

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/tools")
}

/// Runs a script. Returns why it could not run here.
fn run(name: &str) -> Result<(), String> {
    let dir = TempDir::with_prefix("ubtrfs-tools-").unwrap();
    // Other users look for the program here too.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (programs, scratch) = (dir.path().join("bin"), dir.path().join("scratch"));
    std::fs::create_dir(&programs).unwrap();
    for name in NAMES {
        symlink(env!("CARGO_BIN_EXE_ubtrfs"), programs.join(name)).unwrap();
    }
    let mut command = Command::new("timeout");
    command.args(["-k", "20", "240", "sh", "-c", "umask 022; exec sh \"$@\"", "sh"]);
    command.arg(scripts().join(format!("{name}.sh"))).args([&programs, &scratch]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match output.status.code() {
        Some(0) => Ok(()),
        Some(LACKS) => Err(out.lines().filter_map(|line| line.strip_prefix("skipped: ")).collect()),
        status => panic!("{name}: status {status:?}\n{out}{err}"),
    }
}

#[test]
fn each_script_is_in_a_list() {
    let files = std::fs::read_dir(scripts()).unwrap().map(|entry| entry.unwrap().path());
    let is_script =
        |file: &PathBuf| file.extension() == Some(OsStr::new("sh")) && file.file_stem() != Some("lib".as_ref());
    let found: BTreeSet<String> =
        files.filter(is_script).map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let listed = [REQUIRED, OPTIONAL].concat();
    assert_eq!(found, listed.iter().map(|name| (*name).to_owned()).collect());
}

#[test]
fn programs_that_scripts_prepare_installs_work() {
    if !capability::root() || !capability::fuse() {
        return;
    }
    for name in REQUIRED {
        if let Err(reason) = run(name) {
            assert!(!capability::in_ci(), "CI needs what {name} lacks: {reason}; run scripts/prepare");
            eprintln!("SKIPPED: {name}: {reason}");
        }
    }
}

#[test]
fn programs_that_are_installed_here_work() {
    if !capability::root() || !capability::fuse() {
        return;
    }
    for name in OPTIONAL {
        if let Err(reason) = run(name) {
            eprintln!("NOT RUN: {name}: {reason}");
        }
    }
}
