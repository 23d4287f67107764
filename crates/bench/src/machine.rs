//! Functions about the machine: its programs, caches and rights.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the path of a program in the build directory of this program.
pub(crate) fn beside(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    // Test binaries are one directory deeper than other programs, so the parent directory is searched too.
    let places = own.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    let found = places.into_iter().find(|path| path.is_file());
    found.with_context(|| format!("{name} is missing beside {}; build it with: cargo build --release", own.display()))
}

/// Returns the path of a program of the system.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fixed = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    let found = std::env::split_paths(&path).chain(fixed).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.with_context(|| format!("the program {name} is missing; install it (Debian: btrfs-progs, mount)"))
}

/// Writes out all dirty data of the machine, and drops the caches.
pub(crate) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the caches; run as root")
}

/// Drops the machine's caches if allowed; otherwise warns that the measurement begins with warm caches.
pub(crate) fn drop_caches_if_root() {
    if let Err(error) = drop_caches() {
        eprintln!("bench: the caches are warm: {error:#}");
    }
}

/// Reads a file into the page cache.
pub(crate) fn read_into_cache(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut buf = vec![0; 1 << 20];
    while file.read(&mut buf)? > 0 {}
    Ok(())
}

/// Fails with advice if this process is not root.
pub(crate) fn need_root(what: &str) -> Result<()> {
    if !is_root() {
        bail!("{what} needs root, for mounts and cold caches; run it with sudo");
    }
    Ok(())
}

/// Describes the machine for readers of the figures.
pub(crate) fn describe() -> serde_json::Value {
    let first_word = |path: &str| {
        std::fs::read_to_string(path).unwrap_or_default().split_whitespace().next().unwrap_or_default().to_owned()
    };
    let uname = rustix::system::uname();
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory.split_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok()).unwrap_or_default();
    serde_json::json!({
        "kernel": uname.release().to_string_lossy(),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_mib": kib / 1024,
        // Callers read the load after their measurements, so it includes the load of the measurements.
        "load_1_minute": first_word("/proc/loadavg"),
    })
}
