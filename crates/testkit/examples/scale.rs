//! Prints how the cost of typical operations grows when one property of a filesystem doubles, and doubles again:
//!
//! `scale -- [--only NAME] [--times N] [--bar EXPONENT]`
//!
//! Each dimension of `testkit::Dimension` runs in this process, on a device in memory, at sizes `n`, `2n` and `4n`, where
//! `n` is its base size times N. The table has the processor time and the counts of each stage, and the exponents from
//! `n` to `4n`. The exit status is 1 if an exponent exceeds the bar (default: 1.1 and the noise) in a stage that takes
//! long enough to be measured. Processor time varies by about 10% on an idle machine, which changes an exponent by 0.07;
//! on a busy machine it varies more, so compare the counts, which hardly vary.

use std::process::ExitCode;

use ubtrfs_testkit::{Cost, Dimension, exponent};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let only = value("--only").map_or("", String::as_str);
    let times: f64 = value("--times").and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let bar: f64 = value("--bar").and_then(|text| text.parse().ok()).unwrap_or(1.1 + NOISE);
    let mut nr_above = 0;
    for dimension in Dimension::ALL.iter().filter(|dimension| dimension.name.contains(only)) {
        let base = (dimension.base as f64 * times).max(1.0) as u64;
        println!("\n{}: {base}, {}, {}", dimension.name, 2 * base, 4 * base);
        println!(
            "{:16} {:>9} {:>9} {:>9} {:>5} | {:>9} {:>9} {:>9} {:>5}",
            "stage", "cpu ms", "2n", "4n", "exp", "count", "2n", "4n", "exp"
        );
        let runs: Result<Vec<_>, _> = [1, 2, 4].into_iter().map(|factor| dimension.run(factor * base)).collect();
        let runs = match runs {
            Ok(runs) => runs,
            Err(error) => {
                println!("failed: {error:?}");
                nr_above += 1;
                continue;
            }
        };
        for (stage, &(name, first)) in runs[0].iter().enumerate() {
            let costs: Vec<Cost> = runs.iter().map(|run| run[stage].1).collect();
            let ms: Vec<f64> = costs.iter().map(|cost| cost.cpu.as_secs_f64() * 1000.0).collect();
            let counts: Vec<f64> = costs.iter().map(|cost| cost.counted() as f64).collect();
            let by_time = exponent(ms[0].max(MS_MIN), ms[2].max(MS_MIN), 4.0);
            let by_count = exponent(counts[0].max(COUNT_MIN), counts[2].max(COUNT_MIN), 4.0);
            let is_above = by_time > bar || by_count > bar;
            nr_above += u32::from(is_above);
            println!(
                "{name:16} {:9.1} {:9.1} {:9.1} {by_time:5.2} | {:9} {:9} {:9} {by_count:5.2}{}",
                ms[0],
                ms[1],
                ms[2],
                first.counted(),
                counts[1],
                counts[2],
                if is_above { "  above the bar" } else { "" }
            );
        }
    }
    println!("\n{nr_above} stages above the bar of {bar}");
    if nr_above == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Noise of the exponents of processor time.
const NOISE: f64 = 0.1;
/// Shorter times count as this time, because they are mostly noise.
const MS_MIN: f64 = 20.0;
/// Smaller counts count as this count.
const COUNT_MIN: f64 = 2000.0;
