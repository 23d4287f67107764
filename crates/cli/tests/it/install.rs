//! Tests of `scripts/install` and `scripts/package`: what they install runs, and nothing is left when it is removed.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

use crate::common::ok;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the generator of manual pages beside the program of this test, and returns their folder.
fn built() -> PathBuf {
    ubtrfs_testkit::build_example("generate").unwrap();
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
    for path in [
        "sbin/mount.ubtrfs",
        "share/man/man1/ubtrfs-subvolume-create.1",
        "share/man/man5/ubtrfs.5",
        "share/man/man8/mkfs.btrfs.8",
        "share/man/man8/btrfs-inspect-internal.8",
        "share/doc/ubtrfs/mount.md",
    ] {
        assert!(at(path).exists(), "{path}");
    }
    // Each page by a name of btrfs-progs leads to one that exists.
    for page in files_below(&at("share/man/man8")) {
        let text = fs::read_to_string(&page).unwrap();
        let target = text.trim_end().strip_prefix(".so ").unwrap();
        assert!(at("share/man").join(target).exists(), "{page}: {target}");
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

/// Makes the two packages twice: the same program gives the same packages.
fn packages(format: &str, built: &Path, out: &Path) -> [PathBuf; 2] {
    let package = |out: &Path| {
        let mut command = Command::new(workspace().join("scripts/package"));
        let made = ok(command.arg(format).arg(out).env("BUILT", built).env("COMPRESSION", "none").output().unwrap());
        made.lines().map(PathBuf::from).collect::<Vec<_>>()
    };
    let (made, again) = (package(out), TempDir::new().unwrap());
    for (first, second) in made.iter().zip(package(again.path())) {
        assert!(fs::read(first).unwrap() == fs::read(second).unwrap(), "{}", first.display());
    }
    made.try_into().unwrap()
}

#[test]
fn rpm_packages_install_into_an_empty_root_and_are_erased_without_a_trace() {
    if !capability::root() || !capability::program("rpmbuild") {
        return;
    }
    let (built, rpms, root) = (built(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let [main, progs] = packages("rpm", &built, rpms.path());
    let database = root.path().join("rpm");
    let rpm = |words: &[&OsStr]| {
        let mut command = Command::new("rpm");
        command.arg("--root").arg(root.path()).args(["--dbpath", "/rpm", "--nodeps"]).args(words);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    rpm(&["-i".as_ref(), main.as_ref(), progs.as_ref()]);
    let at = |path: &str| root.path().join("usr").join(path);
    for name in ["sbin/mkfs.btrfs", "sbin/mount.ubtrfs", "bin/btrfs"] {
        assert!(fs::canonicalize(at(name)).unwrap().ends_with("usr/bin/ubtrfs"), "{name}");
    }
    assert!(ok(Command::new(at("bin/btrfs")).arg("--version").output().unwrap()).starts_with("btrfs-progs v"));
    for path in ["share/man/man1/ubtrfs-mount.1.gz", "share/licenses/ubtrfs/LICENSE-MIT"] {
        assert!(at(path).exists(), "{path}");
    }
    let excluded = ok(Command::new("rpm").args(["-qp", "--conflicts"]).arg(&progs).output().unwrap());
    assert_eq!(excluded.trim(), "btrfs-progs");
    rpm(&["-e".as_ref(), "ubtrfs-btrfs-progs".as_ref(), "ubtrfs".as_ref()]);
    let left = files_below(root.path());
    assert!(left.iter().all(|file| file.starts_with(database.to_str().unwrap())), "{left:?}");
}

#[test]
fn packages_install_into_an_empty_root_and_are_purged_without_a_trace() {
    if !capability::root() || !capability::program("dpkg-deb") {
        return;
    }
    let (built, debs, root) = (built(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let [main, progs] = packages("deb", &built, debs.path());
    let database = root.path().join("var/lib/dpkg");
    for dir in ["info", "updates", "triggers"] {
        fs::create_dir_all(database.join(dir)).unwrap();
    }
    fs::write(database.join("status"), "").unwrap();
    let dpkg = |words: &[&str]| {
        let mut command = Command::new("dpkg");
        command.arg("--root").arg(root.path()).args(["--force-depends", "--log=/dev/null"]);
        // The empty root has no shell.
        command.arg("--force-script-chrootless");
        // The machine's own rules may leave out documents and manual pages.
        command.arg("--path-include=/*").args(words);
        // It says that the libraries of the system are missing in the empty root.
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    // Debian's package owns names in /bin and /sbin, which are links.
    for dir in ["bin", "sbin"] {
        fs::create_dir_all(root.path().join("usr").join(dir)).unwrap();
        std::os::unix::fs::symlink(format!("usr/{dir}"), root.path().join(dir)).unwrap();
    }
    let old = root.path().join("old");
    fs::create_dir_all(old.join("DEBIAN")).unwrap();
    let control =
        "Package: btrfs-progs\nVersion: 1\nArchitecture: all\nMaintainer: none <none@none>\nDescription: old\n";
    fs::write(old.join("DEBIAN/control"), control).unwrap();
    // Another test may have cleared the umask of this process.
    fs::set_permissions(old.join("DEBIAN"), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["bin/btrfs", "sbin/mkfs.btrfs", "sbin/fsck.btrfs"] {
        fs::create_dir_all(old.join(name).parent().unwrap()).unwrap();
        fs::write(old.join(name), "old").unwrap();
    }
    let deb = debs.path().join("old.deb");
    ok(Command::new("dpkg-deb").args(["--root-owner-group", "-Znone", "--build"]).args([&old, &deb]).output().unwrap());
    fs::remove_dir_all(&old).unwrap();
    dpkg(&["-i", deb.to_str().unwrap()]);
    dpkg(&["-i", main.to_str().unwrap(), progs.to_str().unwrap()]);
    let at = |path: &str| root.path().join("usr").join(path);
    for name in ["sbin/mkfs.btrfs", "sbin/fsck.btrfs", "sbin/btrfsck", "sbin/btrfstune"] {
        assert!(fs::canonicalize(at(name)).unwrap().ends_with("usr/bin/ubtrfs"), "{name}");
    }
    assert!(ok(Command::new(at("bin/btrfs")).arg("--version").output().unwrap()).starts_with("btrfs-progs v"));
    for path in [
        "sbin/mount.ubtrfs",
        "share/man/man1/ubtrfs-mount.1.gz",
        "share/man/man5/ubtrfs.5.gz",
        "share/man/man8/btrfs-subvolume.8.gz",
        "share/bash-completion/completions/ubtrfs",
        "share/doc/ubtrfs/copyright",
        "share/doc/ubtrfs/third-party-licences.gz",
        "share/doc/ubtrfs/examples/fstab",
    ] {
        assert!(at(path).exists(), "{path}");
    }
    // btrfs-progs and its replacement exclude each other.
    let fields = ok(Command::new("dpkg-deb").arg("-f").arg(progs).arg("Conflicts").output().unwrap());
    assert_eq!(fields.trim(), "btrfs-progs");
    dpkg(&["--purge", "ubtrfs-btrfs-progs", "ubtrfs"]);
    for dir in ["bin", "sbin"] {
        // dpkg removes the links with the last package that has something there.
        let _ = fs::remove_file(root.path().join(dir));
    }
    let left = files_below(root.path());
    assert!(left.iter().all(|file| file.starts_with(database.to_str().unwrap())), "{left:?}");
}
