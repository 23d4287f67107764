//! Makes, sends and receives random chains of snapshots (see `testkit::send`):
//!
//! `send_rounds -- [--bed pairs|to-linux|from-linux|mutations|cloned|prefixes] [--from SEED] [--rounds N]
//! [--operations N] [--threads N] [--judge N] [--keep DIR] [--streams N] [--step N] [--most BYTES]`
//!
//! Each round has its own seed. `pairs` and the beds in memory run rounds on several threads. With `--judge N`, Linux
//! judges every N-th round of `pairs` (0 for none). With `--streams N`, a round of `mutations` has N streams. With
//! `--step N`, a round of `prefixes` takes every N-th prefix; with `--most BYTES`, only of streams that are not longer. The
//! exit status is 1 if a round failed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;
use ubtrfs_testkit::receive_round;
use ubtrfs_testkit::send::{MutationRound, PairRound, SendRound, check_cloned, check_prefixes};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| value(name).and_then(|text| text.parse().ok()).unwrap_or(default);
    let bed = value("--bed").map_or("pairs", String::as_str);
    let (from, rounds, judge) = (number("--from", 1), number("--rounds", 10), number("--judge", 50));
    let operations = usize::try_from(number("--operations", 60)).unwrap_or(60);
    let (nr_streams, nr_received) = (AtomicUsize::new(0), AtomicU64::new(0));
    let run = |seed: u64| -> Result<()> {
        let keep = value("--keep").map(|dir| PathBuf::from(dir).join(seed.to_string()));
        match bed {
            "to-linux" => SendRound { seed, operations, keep }.run(),
            "from-linux" => {
                println!("seed {seed}: {}", receive_round(seed, 4, operations, keep.as_deref())?);
                Ok(())
            }
            "mutations" => {
                let done = MutationRound { seed, nr_streams: number("--streams", 1000) }.run()?;
                nr_received.fetch_add(done.nr_received, Ordering::Relaxed);
                nr_streams.fetch_add((done.nr_received + done.nr_failed) as usize, Ordering::Relaxed);
                println!("seed {seed}: {} streams received, {} failed", done.nr_received, done.nr_failed);
                Ok(())
            }
            "cloned" => check_cloned(seed, operations).map(|(bytes, shared)| {
                nr_streams.fetch_add(1, Ordering::Relaxed);
                println!("seed {seed}: {bytes} bytes of files, {shared} shared");
            }),
            "prefixes" => {
                let step = usize::try_from(number("--step", 1)).unwrap_or(1);
                let most_bytes = usize::try_from(number("--most", u64::MAX)).unwrap_or(usize::MAX);
                let (streams, prefixes) = check_prefixes(seed, step, most_bytes)?;
                nr_streams.fetch_add(prefixes, Ordering::Relaxed);
                println!("seed {seed}: {prefixes} prefixes of {streams} streams");
                Ok(())
            }
            _ => {
                let by_linux = judge > 0 && seed.is_multiple_of(judge);
                let nr = PairRound { seed, operations, by_linux, keep }.run()?;
                nr_streams.fetch_add(nr, Ordering::Relaxed);
                Ok(())
            }
        }
    };
    let threads = if !bed.contains("linux") { number("--threads", 2).max(1) } else { 1 };
    let (next, failed, began) = (AtomicU64::new(from), AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + rounds {
                        return;
                    }
                    if let Err(error) = run(seed) {
                        failed.fetch_add(1, Ordering::Relaxed);
                        println!("seed {seed}: {error:?}");
                    }
                }
            });
        }
    });
    let (failed, streams) = (failed.into_inner(), nr_streams.into_inner());
    println!("{failed} of {rounds} rounds failed; {streams} streams in {:.0} s", began.elapsed().as_secs_f64());
    if bed == "mutations" {
        println!("{} of them were received", nr_received.into_inner());
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
