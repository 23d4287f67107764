//! The library under test, and programs that use it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::run;

/// A folder with our library under the name by which programs find it.
pub(crate) struct Library {
    dir: TempDir,
}

impl Library {
    /// Links the library with the versions of its symbols, as an installation does.
    pub(crate) fn link() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
        let library = dir.path().join("libbtrfsutil.so.1");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/link-library");
        run(script, [OsStr::new("btrfsutil"), built("libbtrfsutil.a").as_os_str(), library.as_os_str()]).unwrap();
        Self { dir }
    }

    /// The library as cargo builds it, without versions.
    pub(crate) fn of_cargo() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-btrfsutil-").unwrap();
        symlink(built("libbtrfsutil.so"), dir.path().join("libbtrfsutil.so.1")).unwrap();
        Self { dir }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// A file that cargo built together with this test.
fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join(name)
}

/// Compiles a C program of the tests against the original header.
pub(crate) fn compile(name: &str, dir: &Path) -> PathBuf {
    let source = program(&format!("{name}.c"));
    let made = dir.join(name);
    let args = [OsStr::new("-Wall"), OsStr::new("-o"), made.as_os_str(), source.as_os_str(), OsStr::new("-lbtrfsutil")];
    run("cc", args).unwrap();
    made
}

/// The path of a program of the tests.
pub(crate) fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/programs").join(name)
}

/// Runs a program and returns its output. `library` is the folder of our library; without it, the original is used.
pub(crate) fn output_of(words: &[&OsStr], library: Option<&Path>) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "300"]).args(words);
    // Cargo sets the variable for tests.
    match library {
        Some(library) => command.env("LD_LIBRARY_PATH", library),
        None => command.env_remove("LD_LIBRARY_PATH"),
    };
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{words:?}: {}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The path of the original library.
pub(crate) fn original() -> PathBuf {
    let found = run("cc", ["-print-file-name=libbtrfsutil.so"]).unwrap();
    fs::canonicalize(found.trim()).unwrap()
}
