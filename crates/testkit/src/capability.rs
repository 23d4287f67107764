//! Checks what this machine can do. A test that needs a missing capability prints that it is skipped, and fails in
//! CI.
//!
//! I1. With `CI=true`, nothing is skipped, because an oracle that did not run is a failure.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::command::run;
use crate::{Image, LoopMount};

/// Whether tests run in CI, where nothing may be skipped.
pub fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

/// Whether root, loop devices, btrfs-progs and the kernel's btrfs are available.
///
/// # Panics
/// In CI, if they are not.
pub fn kernel_oracle() -> bool {
    static PROBE: OnceLock<Result<(), String>> = OnceLock::new();
    let probe = PROBE.get_or_init(|| {
        if !rustix_is_root() {
            return Err("not root".to_owned());
        }
        let image = Image::kernel_made(128 << 20, &[]).map_err(|error| format!("{error:#}"))?;
        LoopMount::new(image.path(), "").map(drop).map_err(|error| format!("{error:#}"))
    });
    answer("the kernel's btrfs (root, loop devices, btrfs-progs)", probe)
}

/// Whether the test runs as root.
///
/// # Panics
/// In CI, if it does not.
pub fn root() -> bool {
    answer("root", &if rustix_is_root() { Ok(()) } else { Err("not root".to_owned()) })
}

/// Whether /dev/fuse can be opened.
///
/// # Panics
/// In CI, if it cannot.
pub fn fuse() -> bool {
    static PROBE: OnceLock<Result<(), String>> = OnceLock::new();
    let probe = PROBE.get_or_init(|| {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .map(drop)
            .map_err(|error| format!("/dev/fuse: {error}"))
    });
    answer("FUSE", probe)
}

/// Returns a value if the kernel carries FUSE requests in rings of io_uring. In CI, this turns on the kernel's switch for
/// them, until the value is dropped.
///
/// # Panics
/// In CI, if the kernel has no rings.
pub fn fuse_rings() -> Option<FuseRings> {
    let turned_on = !ubtrfs_device::has_fuse_rings() && in_ci();
    if turned_on {
        // The CI machine exists only for the tests, so the tests may change the switch. A kernel may lack it or forbid
        // the change.
        if let Err(error) = std::fs::write(RING_SWITCH, "Y") {
            eprintln!("{RING_SWITCH}: {error}");
        }
    }
    let rings = FuseRings { turned_on };
    let problem = format!("needs FUSE over io_uring (Linux 6.14); write Y to {RING_SWITCH}");
    let found = if ubtrfs_device::has_fuse_rings() { Ok(()) } else { Err(problem) };
    answer("FUSE over io_uring", &found).then_some(rings)
}

/// FUSE over io_uring is on; see [`fuse_rings`].
#[derive(Debug)]
pub struct FuseRings {
    turned_on: bool,
}

impl Drop for FuseRings {
    fn drop(&mut self) {
        if self.turned_on {
            let _ = std::fs::write(RING_SWITCH, "N");
        }
    }
}

const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether a program is on the PATH.
///
/// # Panics
/// In CI, if it is not.
pub fn program(name: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| Path::new(&dir).join(name).exists()));
    answer(name, &if found { Ok(()) } else { Err(format!("no program {name} on the PATH; install it")) })
}

/// Whether C programs can be compiled that use this header.
///
/// # Panics
/// In CI, if they cannot.
pub fn c_header(name: &str) -> bool {
    let found = run("cc", ["-E", "-x", "c", "-include", name, "/dev/null"]);
    answer(name, &found.map(drop).map_err(|error| format!("{error:#}")))
}

/// Finds a Python that has a module; `None` if there is none.
///
/// # Panics
/// In CI, if there is none.
pub fn python_with(module: &str) -> Option<String> {
    let has_module = |python: &&str| run(python, ["-c", &format!("import {module}")]).is_ok();
    // A Python that the user installed may lack the modules of the system.
    let found = ["python3", "/usr/bin/python3"].into_iter().find(has_module);
    let problem = || format!("no Python has it; install python3-{module}");
    answer(&format!("Python's module {module}"), &found.map(drop).ok_or_else(problem));
    found.map(str::to_owned)
}

/// Makes a virtual environment of Python with packages from PyPI in `dir`, or finds it there. Returns its interpreter;
/// `None` if the environment cannot be made.
///
/// # Panics
/// In CI, if it cannot be made.
pub fn python_environment(dir: &Path, packages: &[&str]) -> Option<PathBuf> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let python = dir.join("bin/python");
    // Written last, so an interrupted environment is made again.
    let mark = dir.join("complete");
    let wanted = packages.join(" ");
    let program = python.to_string_lossy();
    let make = || -> anyhow::Result<()> {
        if std::fs::read_to_string(&mark).is_ok_and(|made| made == wanted) && run(&program, ["--version"]).is_ok() {
            return Ok(());
        }
        run("python3", [OsStr::new("-m"), OsStr::new("venv"), OsStr::new("--clear"), dir.as_os_str()])?;
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        run(&program, install.iter().chain(packages))?;
        Ok(std::fs::write(&mark, &wanted)?)
    };
    let made = make().map_err(|error| format!("{error:#}"));
    answer(&format!("python3 with venv, and PyPI or its packages {wanted}"), &made).then_some(python)
}

/// The kernel's release, for messages.
pub fn kernel_release() -> String {
    run("uname", ["-r"]).unwrap_or_default().trim().to_owned()
}

fn rustix_is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn answer(what: &str, probe: &Result<(), String>) -> bool {
    match probe {
        Ok(()) => true,
        Err(why) => {
            assert!(!in_ci(), "CI needs {what}, and it is missing: {why}");
            eprintln!("SKIPPED: this test needs {what}: {why}");
            false
        }
    }
}
