//! Runs the tests of the Python package with the extension module that cargo built: pytest with the doctests, and mypy.
//!
//! Method: a virtual environment is made once below the target folder. The package, the extension module and the entry
//! points of a wheel are put into a folder, which is on the path of the interpreter as an installed wheel would be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use ubtrfs_testkit::capability;

/// The packages that the tests need, from PyPI.
const PACKAGES: &[&str] = &["pytest", "fsspec", "mypy"];

/// The package as a wheel would install it.
struct InstalledPackage {
    python: PathBuf,
    dir: TempDir,
}

impl InstalledPackage {
    /// `None` if this machine has no virtual environment.
    fn new() -> Option<Self> {
        let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
        let python = capability::python_environment(&environment, PACKAGES)?;
        let dir = TempDir::with_prefix("ubtrfs-python-").unwrap();
        let package = dir.path().join("ubtrfs");
        fs::create_dir(&package).unwrap();
        for entry in fs::read_dir(crate_dir().join("python/ubtrfs")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
            }
        }
        // Cargo builds the library beside this program.
        let module = std::env::current_exe().unwrap().with_file_name("lib_ubtrfs.so");
        symlink(module, package.join("_ubtrfs.abi3.so")).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let about = dir.path().join(format!("ubtrfs-{version}.dist-info"));
        fs::create_dir(&about).unwrap();
        fs::write(about.join("METADATA"), format!("Metadata-Version: 2.1\nName: ubtrfs\nVersion: {version}\n"))
            .unwrap();
        fs::write(about.join("entry_points.txt"), entry_points()).unwrap();
        Some(Self { python, dir })
    }

    /// Runs a module of Python in the folder of this crate.
    fn run(&self, module: &str, args: &[&str]) {
        let mut command = Command::new(&self.python);
        command.args(["-m", module]).args(args).current_dir(crate_dir());
        // Nothing is written into the sources.
        command.env("PYTHONPATH", self.dir.path()).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("MYPYPATH", self.dir.path());
        // The program `ubtrfs`, which mounts, is two folders above this one.
        let programs = std::env::current_exe().unwrap().parent().and_then(Path::parent).unwrap().to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(programs).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(folders).unwrap());
        let output = command.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        println!("{out}{err}");
        assert!(output.status.success(), "{module} failed: {}", output.status);
    }
}

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The entry points of pyproject.toml, as a wheel has them.
fn entry_points() -> String {
    let project = fs::read_to_string(crate_dir().join("pyproject.toml")).unwrap();
    let (_, section) = project.split_once("[project.entry-points.\"fsspec.specs\"]\n").unwrap();
    let lines = section.lines().take_while(|line| !line.is_empty());
    lines.fold("[fsspec.specs]\n".to_owned(), |text, line| text + &line.replace('"', "") + "\n")
}

#[test]
fn the_tests_of_the_package_pass() {
    let Some(package) = InstalledPackage::new() else { return };
    package.run("pytest", &["tests"]);
}

#[test]
fn the_examples_in_docstrings_are_right() {
    let Some(package) = InstalledPackage::new() else { return };
    package.run("pytest", &["--doctest-modules", "--pyargs", "ubtrfs"]);
}

#[test]
fn the_types_are_strict() {
    let Some(package) = InstalledPackage::new() else { return };
    let cache = format!("--cache-dir={}/mypy", env!("CARGO_TARGET_TMPDIR"));
    package.run("mypy", &["--strict", &cache, "-p", "ubtrfs"]);
    package.run("mypy", &["--strict", &cache, "tests/typed_program.py"]);
}
