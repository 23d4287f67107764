//! Runs many rounds of [`SendRound`]: `send_rounds -- --from SEED --rounds N [--operations N] [--keep DIR]`.

use std::process::ExitCode;

use ubtrfs_testkit::send::SendRound;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| value(name).and_then(|text| text.parse().ok()).unwrap_or(default);
    let (from, rounds) = (number("--from", 1), number("--rounds", 10));
    let operations = usize::try_from(number("--operations", 60)).unwrap_or(60);
    let mut failed = Vec::new();
    for seed in from..from + rounds {
        let keep = value("--keep").map(|dir| std::path::Path::new(dir).join(seed.to_string()));
        match (SendRound { seed, operations, keep }).run() {
            Ok(()) => println!("seed {seed}: equal"),
            Err(error) => {
                println!("seed {seed}: {error:?}");
                failed.push(seed);
            }
        }
    }
    println!("{} of {rounds} rounds failed: {failed:?}", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
