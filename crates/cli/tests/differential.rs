//! Random system calls by several users on our mount and on Linux's btrfs side by side: equal answers, equal attributes, equal
//! trees after remounts and on the other side's mount, and `btrfs check` at the end.
//!
//! Method: `testkit::differential`. A minute of it here; for hours see the example `differential` of testkit. `UBTRFS_SEED=N`
//! begins with another seed. Needs root, FUSE and the kernel's btrfs; skips loudly without, with CI=true it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use ubtrfs_testkit::differential::{ALLOWED, KNOWN, Options, Setup, hunt};
use ubtrfs_testkit::{Rng, capability};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn options(time: Duration) -> Options {
    Options {
        setups: vec![Setup::new(Path::new(UBTRFS))],
        seed: Rng::seed_or(1),
        steps: 600,
        time,
        stop_at_first: true,
        shrink_time: Duration::from_secs(120),
    }
}

#[test]
fn random_calls_are_answered_as_linux_answers_them() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    match hunt(&options(Duration::from_secs(60))) {
        Ok(summary) => println!("{summary}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn the_documentation_names_every_difference_that_passes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/conformance.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once("\n## Against Linux's btrfs\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let listed: BTreeSet<&str> = section
        .lines()
        .filter_map(|line| line.strip_prefix("- `"))
        .filter_map(|line| line.split_once('`').map(|(name, _)| name))
        .collect();
    let passing: BTreeSet<&str> = ALLOWED.iter().chain(KNOWN).map(|entry| entry.name).collect();
    assert_eq!(listed, passing);
}
