//! Tests of `scripts/install`: what it installs runs, and `uninstall` leaves nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::common::ok;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the generator of manual pages beside the program of this test, and returns their folder.
fn built() -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked", "-q", "-p", "ubtrfs-cli", "--example", "generate"]).current_dir(workspace());
    let done = cargo.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    Path::new(env!("CARGO_BIN_EXE_ubtrfs")).parent().unwrap().to_owned()
}

fn install(built: &Path, root: &Path, progs: &str, words: &[&str]) -> Output {
    let mut command = Command::new(workspace().join("scripts/install"));
    command.args(words).env("BUILT", built).env("DESTDIR", root).env("PREFIX", "/usr").env("PROGS", progs);
    command.output().unwrap()
}

fn files_below(dir: &Path) -> Vec<String> {
    let found = ok(Command::new("find").arg(dir).args(["!", "-type", "d"]).output().unwrap());
    found.lines().map(str::to_owned).collect()
}

#[test]
fn what_is_installed_runs_and_is_removed_without_a_trace() {
    let (built, root) = (built(), TempDir::new().unwrap());
    let at = |path: &str| root.path().join("usr").join(path);
    let done = install(&built, root.path(), "yes", &[]);
    assert!(done.status.success(), "{done:?}");
    assert!(ok(Command::new(at("bin/btrfs")).arg("--version").output().unwrap()).starts_with("btrfs-progs v"));
    assert!(ok(Command::new(at("sbin/mkfs.btrfs")).arg("-V").output().unwrap()).contains("part of btrfs-progs v"));
    let image = root.path().join("a.img");
    ok(Command::new(at("sbin/mkfs.btrfs")).args(["-q", "-b", "128M"]).arg(&image).output().unwrap());
    ok(Command::new(at("bin/btrfs")).args(["fi", "df"]).arg(&image).output().unwrap());
    fs::remove_file(&image).unwrap();
    for path in ["sbin/mount.ubtrfs", "share/man/man1/ubtrfs-subvolume-create.1", "share/doc/ubtrfs/mount.md"] {
        assert!(at(path).exists(), "{path}");
    }
    let completions = fs::read_to_string(at("share/bash-completion/completions/ubtrfs")).unwrap();
    assert!(completions.contains("get-default"));
    // A second installation replaces the first.
    let done = install(&built, root.path(), "no", &[]);
    assert!(done.status.success() && !at("bin/btrfs").exists(), "{done:?}");
    let done = install(&built, root.path(), "no", &["uninstall"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(files_below(root.path()), Vec::<String>::new());
    assert_eq!(install(&built, root.path(), "no", &["uninstall"]).status.code(), Some(1));
}

#[test]
fn the_programs_of_another_package_are_not_replaced() {
    let (built, root) = (built(), TempDir::new().unwrap());
    let other = root.path().join("usr/sbin/mkfs.btrfs");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::write(&other, "#!/bin/sh\n").unwrap();
    let done = install(&built, root.path(), "yes", &[]);
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("belongs to another package"), "{done:?}");
    assert_eq!(files_below(root.path()), [other.to_str().unwrap()]);
}

#[test]
fn relative_paths_start_at_the_directory_of_the_caller() {
    let (built, root) = (built(), TempDir::new().unwrap());
    std::os::unix::fs::symlink(&built, root.path().join("built")).unwrap();
    let install = |words: &[&str]| {
        let mut command = Command::new(workspace().join("scripts/install"));
        command.args(words).current_dir(root.path());
        let done = command.env("BUILT", "built").env("DESTDIR", "to").env("PREFIX", "/usr").output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    install(&[]);
    assert!(root.path().join("to/usr/bin/ubtrfs").exists());
    install(&["uninstall"]);
    assert!(!root.path().join("to/usr/bin/ubtrfs").exists());
}
