//! Makes and sends random chains of snapshots with Linux, and receives them with the engine, except for the last
//! snapshot, which Linux receives into the same filesystem. Compares trees and sharing, and runs both checkers.
//!
//! `cargo run --release -p ubtrfs-testkit --example receive_rounds -- [--from SEED] [--rounds N] [--snapshots 4] [--operations 150] [--keep DIR]`
//! prints one line for each round. The exit status is 1 if a round failed.

use std::path::PathBuf;
use std::process::ExitCode;

use ubtrfs_testkit::receive_round;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let after = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| after(name).map_or(default, |text| text.parse().unwrap_or(default));
    let (from, rounds) = (number("--from", 1), number("--rounds", 10));
    let (snapshots, operations) = (number("--snapshots", 4) as usize, number("--operations", 150) as usize);
    let keep = after("--keep").map(PathBuf::from);
    let mut failed = 0;
    for seed in from..from + rounds {
        match receive_round(seed, snapshots, operations, keep.as_deref()) {
            Ok(line) => println!("seed {seed}: {line}"),
            Err(error) => {
                failed += 1;
                println!("seed {seed}: FAILED: {error:#}");
            }
        }
    }
    println!("{failed} of {rounds} rounds failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
