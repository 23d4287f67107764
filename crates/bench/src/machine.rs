//! What this machine has and lets us do: programs, caches, rights.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A program built beside this one.
pub(crate) fn beside(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    // Tests run from a directory below.
    let places = own.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    let found = places.into_iter().find(|path| path.is_file());
    found.with_context(|| format!("there is no {name} beside {}; build it with: cargo build --release", own.display()))
}

/// Writes out and drops all clean caches of the machine.
pub(crate) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the caches; run as root")
}

/// The same where it is allowed; else the measurement begins with warm caches, which is said.
pub(crate) fn drop_caches_if_root() {
    if let Err(error) = drop_caches() {
        eprintln!("bench: the caches are warm: {error:#}");
    }
}

/// Reads a file once, so that reading it costs nothing later.
pub(crate) fn read_into_cache(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut buf = vec![0; 1 << 20];
    while file.read(&mut buf)? > 0 {}
    Ok(())
}
