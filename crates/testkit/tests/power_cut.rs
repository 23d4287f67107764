//! Power cuts: whatever the medium was left with, the filesystem is clean and holds all that was promised.
//!
//! Method: a workload runs on an engine whose device records every write; the power is cut at many points, each unflushed
//! write being kept, dropped or torn by seed. Each result is opened, checked and compared with what was promised; Linux
//! replays and checks a few of them. `examples/power_cuts.rs` does the same at scale.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ubtrfs_testkit::{Image, PowerCuts, Rng, capability};

/// Cuts of each of these seeds; every kind of workload has a seed in thirteen that follow each other.
fn cut(seeds: std::ops::Range<u64>, cuts: usize) {
    let linux = capability::kernel_oracle();
    let image = Image::empty(0).unwrap();
    let first = Rng::seed_or(seeds.start);
    for seed in first..first + (seeds.end - seeds.start) {
        let run = PowerCuts::record(seed).unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
        println!("seed {seed}: {}", run.name);
        let mut builder = run.builder();
        let points = run.points(cuts);
        for (number, point) in points.into_iter().enumerate() {
            let cut = run.cut(&mut builder, number, point);
            let found = run.verify(&cut).unwrap_or_else(|error| panic!("{error:#}"));
            if linux && number == cuts / 2 {
                run.verify_by_linux(&cut, &found, image.path()).unwrap_or_else(|error| panic!("{error:#}"));
            }
        }
    }
}

#[test]
fn cuts_keep_promises() {
    cut(1001..1014, 30);
}

#[test]
fn cuts_keep_promises_with_other_seeds() {
    cut(2001..2014, 30);
}
