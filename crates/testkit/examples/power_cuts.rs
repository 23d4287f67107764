//! Runs many power cuts: records `--seeds` workloads, and cuts the power at `--cuts` points of each (at an eighth as
//! many if the filesystem is full, because verifying then takes longer).
//!
//! `cargo run --release -p ubtrfs-testkit --example power_cuts -- [--bed alone|threads|balance] [--seeds 200]
//! [--cuts 500] [--from 1] [--every 1] [--repeat 1] [--linux 500] [--threads 2] [--seconds N] [--keep DIR]`
//!
//! With `--linux N`, Linux also replays N of the cuts, and `btrfs check` checks them. The exit status is 1 if a promise
//! was broken or a check was not clean. The last line also counts the cuts that Linux could judge only in part, because
//! Linux ran out of space on a device without unallocated space.
//!
//! `--bed alone` (the default) changes the filesystem with one thread, so a run repeats exactly from its seed. `--bed
//! threads` uses several threads, while the device sometimes delays requests; a seed determines the actions of the
//! threads but not their interleaving. `--bed balance` adds balances with random filters, conversions, resizes and
//! quotas. Linux then gets only cuts that interrupt a balance, at most one of each seed, and resumes the balance.
//!
//! `--repeat N` runs each seed N times. `--every N` uses every N-th seed: with 8 for `--bed threads` and 13 for `--bed
//! alone`, all seeds have one kind of run. `--keep` saves the image of the first two failed cuts of each run, and the
//! actions of each thread. `--threads` is the number of seeds that run in parallel.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use ubtrfs_testkit::{Cut, CutBuilder, Image, LinuxVerdict, PowerCuts, ThreadedCuts, TreeEntry};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bed {
    Alone,
    Threads,
    Balance,
}

/// A recorded run, of one thread or of several threads.
enum Run {
    Alone(Box<PowerCuts>),
    Threads(Box<ThreadedCuts>),
}

impl Run {
    fn record(seed: u64, bed: Bed) -> Result<Self> {
        Ok(match bed {
            Bed::Alone => Self::Alone(Box::new(PowerCuts::record(seed)?)),
            Bed::Threads => Self::Threads(Box::new(ThreadedCuts::record(seed)?)),
            Bed::Balance => Self::Threads(Box::new(ThreadedCuts::record_balances(seed)?)),
        })
    }

    /// Whether the cut interrupted a balance.
    fn has_balance(&self, cut: &Cut) -> bool {
        matches!(self, Self::Threads(run) if run.has_balance(cut).unwrap_or(false))
    }

    fn name(&self) -> &str {
        match self {
            Self::Alone(run) => &run.name,
            Self::Threads(run) => &run.name,
        }
    }

    fn points(&self, cuts: usize) -> Vec<usize> {
        match self {
            Self::Alone(run) => run.points(cuts),
            Self::Threads(run) => run.points(cuts),
        }
    }

    fn builder(&self) -> CutBuilder {
        match self {
            Self::Alone(run) => run.builder(),
            Self::Threads(run) => run.builder(),
        }
    }

    fn cut(&self, builder: &mut CutBuilder, number: usize, point: usize) -> Cut {
        match self {
            Self::Alone(run) => run.cut(builder, number, point),
            Self::Threads(run) => run.cut(builder, number, point),
        }
    }

    fn verify(&self, cut: &Cut) -> Result<Vec<TreeEntry>> {
        match self {
            Self::Alone(run) => run.verify(cut),
            Self::Threads(run) => run.verify(cut),
        }
    }

    fn verify_by_linux(&self, cut: &Cut, ours: &[TreeEntry], image: &Path) -> Result<LinuxVerdict> {
        match self {
            Self::Alone(run) => run.verify_by_linux(cut, ours, image),
            Self::Threads(run) => run.verify_by_linux(cut, ours, image),
        }
    }

    /// Reports whether Linux's replay of the log leaves the same state as ours. If it does, the broken promise is not
    /// the fault of our replay.
    fn blame(&self, cut: &Cut, image: &Path) -> String {
        let Self::Alone(run) = self else { return String::new() };
        match run.compare_with_linux(cut, image) {
            Ok(()) => "Linux's replay leaves the same\n".to_owned(),
            Err(error) => format!("Linux's replay: {error:#}\n"),
        }
    }

    fn trace(&self) -> String {
        match self {
            Self::Alone(_) => String::new(),
            Self::Threads(run) => run.trace(),
        }
    }

    fn size(&self) -> (usize, usize, usize) {
        match self {
            Self::Alone(run) => run.size(),
            Self::Threads(run) => run.size(),
        }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let after = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| after(name).map_or(default, |text| text.parse().unwrap_or(default));
    let bed = match after("--bed").map(String::as_str) {
        Some("threads") => Bed::Threads,
        Some("balance") => Bed::Balance,
        _ => Bed::Alone,
    };
    let (repeat, every_seed, keep) = (number("--repeat", 1).max(1), number("--every", 1), after("--keep"));
    let (seeds, cuts, from) = (number("--seeds", 200), number("--cuts", 500), number("--from", 1));
    let (linux, threads) = (number("--linux", 0), number("--threads", 2));
    let deadline = Instant::now() + Duration::from_secs(number("--seconds", 1 << 30));
    let every = (seeds * cuts).checked_div(linux).map_or(u64::MAX, |every| every.max(1));
    let (next, done, checked, recorded) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (failures, out_of_space) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    let fail = |text: String| {
        println!("FAILED {}", text.chars().take(3000).collect::<String>());
        if let Ok(mut failures) = failures.lock() {
            failures.push(text);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let Ok(image) = Image::empty(0) else { return fail("no scratch image".to_owned()) };
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= seeds * repeat || Instant::now() > deadline {
                        return;
                    }
                    let seed = from + index / repeat * every_seed;
                    let run = match Run::record(seed, bed) {
                        Ok(run) => run,
                        Err(error) => {
                            fail(format!("seed {seed}: {error:#}"));
                            continue;
                        }
                    };
                    recorded.fetch_add(1, Ordering::Relaxed);
                    let start = Instant::now();
                    let mut builder = run.builder();
                    let mut is_judged = false;
                    let mut bad = 0;
                    // Make fewer cuts of full filesystems, because verifying one takes twenty times as long.
                    let cuts = if ["no space", "nearly full"].iter().any(|full| run.name().starts_with(full)) { cuts.div_ceil(8) } else { cuts };
                    for (number, point) in run.points(usize::try_from(cuts).unwrap_or(usize::MAX)).into_iter().enumerate() {
                        let cut = run.cut(&mut builder, number, point);
                        done.fetch_add(1, Ordering::Relaxed);
                        let result = run.verify(&cut).and_then(|found| {
                            let is_due = match bed {
                                // Linux gets at most one cut of each seed, from the last two thirds of the seed's cuts.
                                // The cuts of option `--linux` are distributed evenly over the seeds.
                                Bed::Balance => {
                                    let is_behind = checked.load(Ordering::Relaxed) * seeds < linux * (index + 1);
                                    is_behind && !is_judged && number as u64 * 3 >= cuts && run.has_balance(&cut)
                                }
                                _ => (index * cuts + number as u64).is_multiple_of(every),
                            };
                            if is_due && linux > 0 {
                                is_judged = true;
                                if run.verify_by_linux(&cut, &found, image.path())? == LinuxVerdict::OutOfSpace {
                                    println!("Linux ran out of space: {}", cut.what);
                                    out_of_space.fetch_add(1, Ordering::Relaxed);
                                }
                                checked.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(())
                        });
                        if let Err(error) = result {
                            bad += 1;
                            if bad <= 2 {
                                let linux =
                                    if linux == 0 { String::new() } else { run.blame(&cut, image.path()) };
                                if let Some(dir) = keep {
                                    let kept = Path::new(dir).join(format!("seed-{seed}-cut-{number}.img"));
                                    let trace = std::fs::write(kept.with_extension("txt"), run.trace());
                                    if let Err(error) = cut.save(&kept).and(trace.map_err(Into::into)) {
                                        println!("{}: {error:#}", kept.display());
                                    }
                                }
                                fail(format!("{linux}{error:#}"));
                            } else if let Ok(mut failures) = failures.lock() {
                                failures.push(String::new());
                            }
                        }
                    }
                    let (promises, flushes, events) = run.size();
                    println!(
                        "seed {seed}: {promises} promises, {flushes} flushes, {events} events, {cuts} cuts in {:.1} s, {bad} bad: {}",
                        start.elapsed().as_secs_f64(),
                        run.name()
                    );
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default().len();
    println!(
        "{} seeds, {} cuts, {} of them replayed by Linux, {} of these until Linux ran out of space, {failures} failures",
        recorded.into_inner(),
        done.into_inner(),
        checked.into_inner(),
        out_of_space.into_inner()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
