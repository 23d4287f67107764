//! Runs a scripted workload with every possible fault: for every n, the n-th read, write or flush (alone, or with all
//! later ones) fails, transfers too few bytes, transfers wrong bytes, is lost, or panics.
//!
//! `cargo run --release -p ubtrfs-testkit --example faults -- [--max N] [--step N] [--config NAME] [--kind NAME]
//! [--check N] [--threads 2] [--seconds N]` prints one line per kind of fault. The exit status is 1 if a promise was
//! broken. `--check N` runs `btrfs check` on every N-th result. The workload `--config long` makes 2,000 requests of
//! each kind.
//!
//! `--config threads [--runs 1000] [--from 1]` runs only the workloads with several threads. The seed determines the
//! fault.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_testkit::{FaultSweep, Image, ThreadedFaults, btrfs_check_after_failures};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let after = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| after(name).map_or(default, |text| text.parse().unwrap_or(default));
    let (max, step, check) = (number("--max", 2000), number("--step", 1).max(1), number("--check", 0));
    let threads = number("--threads", 2);
    let deadline = Instant::now() + Duration::from_secs(number("--seconds", 1 << 30));
    ubtrfs_testkit::silence_planned_panics();
    if after("--config").is_some_and(|config| config == "threads") {
        let broken = amid_threads(number("--from", 1), number("--runs", 1000), threads, check, deadline);
        println!("{broken} broken promises");
        return if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let mut broken = 0;
    for sweep in FaultSweep::all() {
        let unwanted = |name: &str, own: &str| after(name).is_some_and(|wanted| wanted != own);
        if unwanted("--config", sweep.config) || unwanted("--kind", &sweep.kind()) {
            continue;
        }
        let plans: Vec<u64> = (0..sweep.requests().min(max)).step_by(step as usize).collect();
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let (faults, told, read_only, checked) =
            (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let failures = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(nth) = plans.get(index as usize).filter(|_| Instant::now() < deadline) else {
                            return;
                        };
                        done.fetch_add(1, Ordering::Relaxed);
                        let result = sweep.run(*nth).and_then(|outcome| {
                            faults.fetch_add(u64::from(outcome.faults > 0), Ordering::Relaxed);
                            told.fetch_add(u64::from(outcome.told), Ordering::Relaxed);
                            read_only.fetch_add(u64::from(outcome.read_only), Ordering::Relaxed);
                            if check > 0 && index.is_multiple_of(check) && sweep.btrfs_check_applies() {
                                let image = Image::empty(0)?;
                                outcome.content.save(image.path())?;
                                btrfs_check_after_failures(image.path())?;
                                checked.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(())
                        });
                        if let Err(error) = result
                            && let Ok(mut failures) = failures.lock()
                        {
                            failures.push(format!("{error:#}"));
                        }
                    }
                });
            }
        });
        let failures = failures.into_inner().unwrap_or_default();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        println!(
            "{} {}: {} of {} runs, {} faults, {} told, {} read-only, {} seen by btrfs check, {} broken promises",
            sweep.config,
            sweep.kind(),
            load(&done),
            plans.len(),
            load(&faults),
            load(&told),
            load(&read_only),
            load(&checked),
            failures.len()
        );
        for failure in failures.iter().take(5) {
            println!("  {}", failure.chars().take(1500).collect::<String>());
        }
        broken += failures.len();
    }
    println!("{broken} broken promises");
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs workloads with several threads. Returns the number of runs that broke a promise.
fn amid_threads(from: u64, runs: u64, threads: u64, check: u64, deadline: Instant) -> u64 {
    let (next, done, broken) = (AtomicU64::new(from), AtomicU64::new(0), AtomicU64::new(0));
    let (faults, told, checked) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + runs || Instant::now() > deadline {
                        return;
                    }
                    let verdict = ThreadedFaults::run(seed).and_then(|run| {
                        faults.fetch_add(u64::from(run.hit), Ordering::Relaxed);
                        told.fetch_add(u64::from(run.told), Ordering::Relaxed);
                        if check > 0 && seed.is_multiple_of(check) {
                            let image = Image::empty(0)?;
                            run.content.save(image.path())?;
                            btrfs_check_after_failures(image.path())?;
                            checked.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(())
                    });
                    done.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = verdict {
                        broken.fetch_add(1, Ordering::Relaxed);
                        println!("FAILED {}", format!("{error:#}").chars().take(1500).collect::<String>());
                    }
                }
            });
        }
    });
    println!(
        "threads: {} runs, {} faults, {} told, {} seen by btrfs check",
        done.into_inner(),
        faults.into_inner(),
        told.into_inner(),
        checked.into_inner()
    );
    broken.into_inner()
}
