//! `scripts/install` and `scripts/package` with the library for C.
//!
//! The program that these scripts install, too, has its own tests in crate `cli`. Here, stand-ins take its place.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use ubtrfs_testkit::{capability, run};

use crate::header::crate_dir;
use crate::library::built;

/// A folder with the static library that cargo built, and stand-ins for programs.
fn built_folder() -> TempDir {
    let dir = TempDir::with_prefix("ubtrfs-capi-built-").unwrap();
    fs::create_dir(dir.path().join("examples")).unwrap();
    let script = |name: &str, text: &str| {
        fs::write(dir.path().join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    script("ubtrfs", "");
    script(
        "examples/generate",
        "cd \"$1\" && mkdir bash zsh fish man1 && touch bash/ubtrfs.bash zsh/_ubtrfs fish/ubtrfs.fish man1/ubtrfs.1",
    );
    symlink(built("libubtrfs_capi.a"), dir.path().join("libubtrfs_capi.a")).unwrap();
    dir
}

fn script(name: &str, built: &Path) -> Command {
    let mut command = Command::new(crate_dir().join("../../scripts").join(name));
    command.env("BUILT", built).env("LIBUBTRFS", "yes");
    command
}

fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compiles the image builder with what pkg-config says, and runs it.
fn use_installed(root: &Path, how: &[&str], more: &[&str]) -> PathBuf {
    let mut asked = Command::new("pkg-config");
    asked.args(["--cflags", "--libs"]).args(how).arg("ubtrfs");
    asked.env("PKG_CONFIG_PATH", root.join("lib/pkgconfig"));
    let words = succeeded(&asked.output().unwrap());
    let program = root.join("make_image");
    let mut args = vec![crate_dir().join("examples/make_image.c").display().to_string(), "-o".to_owned()];
    args.push(program.display().to_string());
    args.extend(more.iter().map(ToString::to_string));
    args.extend(words.split_whitespace().map(str::to_owned));
    run("cc", &args).unwrap();
    let (image, folder) = (root.join("disk.img"), root.join("include"));
    let _ = fs::remove_file(&image);
    let mut command = Command::new(&program);
    command.args([&image, &folder]).env("LD_LIBRARY_PATH", root.join("lib"));
    succeeded(&command.output().unwrap());
    let fs = ubtrfs::Filesystem::open_image(&image).unwrap();
    assert_eq!(fs.read("/ubtrfs.h").unwrap(), fs::read(folder.join("ubtrfs.h")).unwrap());
    assert_eq!(fs.label(), b"made in C");
    program
}

#[test]
fn the_installed_library_is_found_by_pkg_config_and_removed() {
    if !capability::program("pkg-config") {
        return;
    }
    let (built, root) = (built_folder(), TempDir::with_prefix("ubtrfs-capi-root-").unwrap());
    let prefix = root.path().join("opt");
    let install = || {
        let mut command = script("install", built.path());
        command.env("PREFIX", &prefix);
        command
    };
    succeeded(&install().output().unwrap());
    let files =
        ["lib/libubtrfs.so.0", "lib/libubtrfs.so", "lib/libubtrfs.a", "lib/pkgconfig/ubtrfs.pc", "include/ubtrfs.h"];
    files.iter().for_each(|file| assert!(prefix.join(file).exists(), "{file}"));
    let program = use_installed(&prefix, &[], &[]);
    let listed = run("readelf", ["-d".as_ref(), program.as_os_str()]).unwrap();
    assert!(listed.contains("[libubtrfs.so.0]"), "{listed}");
    // Without the shared library, the linker takes the static one.
    fs::remove_file(prefix.join("lib/libubtrfs.so")).unwrap();
    let program = use_installed(&prefix, &["--static"], &[]);
    let listed = run("readelf", ["-d".as_ref(), program.as_os_str()]).unwrap();
    assert!(!listed.contains("libubtrfs"), "{listed}");
    for name in ["make_image", "disk.img"] {
        fs::remove_file(prefix.join(name)).unwrap();
    }
    succeeded(&install().arg("uninstall").output().unwrap());
    files.iter().for_each(|file| assert!(!prefix.join(file).exists(), "{file}"));
}

#[test]
fn debian_packages_have_the_library_and_what_compiling_needs() {
    if !capability::program("dpkg-deb") {
        return;
    }
    let (built, out) = (built_folder(), TempDir::with_prefix("ubtrfs-capi-deb-").unwrap());
    let made = succeeded(&script("package", built.path()).env("COMPRESSION", "none").arg(out.path()).output().unwrap());
    let package = |name: &str| {
        let found = made.lines().find(|line| line.contains(&format!("/{name}_"))).unwrap();
        let listed = run("dpkg-deb", ["-c", found]).unwrap();
        let control = run("dpkg-deb", ["-f", found]).unwrap();
        (listed, control)
    };
    let (listed, control) = package("libubtrfs0");
    assert!(listed.contains("./usr/lib/libubtrfs.so.0") && !listed.contains("ubtrfs.h"), "{listed}");
    assert!(control.contains("Depends: libc6 (>= "), "{control}");
    let (listed, control) = package("libubtrfs-dev");
    for file in ["lib/libubtrfs.so -> libubtrfs.so.0", "lib/libubtrfs.a", "include/ubtrfs.h", "lib/pkgconfig/ubtrfs.pc"]
    {
        assert!(listed.contains(&format!("./usr/{file}")), "{file}: {listed}");
    }
    assert!(control.contains("Depends: libubtrfs0 (= 0.1.0)"), "{control}");
    let (listed, _) = package("ubtrfs");
    assert!(!listed.contains("libubtrfs"), "{listed}");
}
