//! Power cuts at scale: `--seeds` recorded workloads, the power cut at `--cuts` points of each.
//!
//! `cargo run --release -p ubtrfs-testkit --example power_cuts -- [--seeds 200] [--cuts 500] [--from 1] [--linux 500]
//! [--threads 2] [--seconds N]`: Linux replays and `btrfs check` checks `--linux` of the cuts. Ends with status 1 where a
//! promise was lost or a check was not clean.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_testkit::{Image, PowerCuts};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: u64| {
        let at = args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
        at.map_or(default, |text| text.parse().unwrap_or(default))
    };
    let (seeds, cuts, from) = (number("--seeds", 200), number("--cuts", 500), number("--from", 1));
    let (linux, threads) = (number("--linux", 0), number("--threads", 2));
    let deadline = Instant::now() + Duration::from_secs(number("--seconds", 1 << 30));
    let every = (seeds * cuts).checked_div(linux).map_or(u64::MAX, |every| every.max(1));
    let (next, done, checked, recorded) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let failures = Mutex::new(Vec::new());
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
                    if index >= seeds || Instant::now() > deadline {
                        return;
                    }
                    let seed = from + index;
                    let run = match PowerCuts::record(seed) {
                        Ok(run) => run,
                        Err(error) => {
                            fail(format!("seed {seed}: {error:#}"));
                            continue;
                        }
                    };
                    recorded.fetch_add(1, Ordering::Relaxed);
                    let start = Instant::now();
                    let mut builder = run.builder();
                    let mut bad = 0;
                    // A full filesystem takes twenty times as long to look at.
                    let cuts = if run.name.starts_with("no space") { cuts.div_ceil(8) } else { cuts };
                    for (number, point) in run.points(usize::try_from(cuts).unwrap_or(usize::MAX)).into_iter().enumerate() {
                        let cut = run.cut(&mut builder, number, point);
                        done.fetch_add(1, Ordering::Relaxed);
                        let result = run.verify(&cut).and_then(|found| {
                            if (index * cuts + number as u64).is_multiple_of(every) && linux > 0 {
                                run.verify_by_linux(&cut, &found, image.path())?;
                                checked.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(())
                        });
                        if let Err(error) = result {
                            bad += 1;
                            if bad <= 2 {
                                let linux = match run.compare_with_linux(&cut, image.path()) {
                                    _ if linux == 0 => String::new(),
                                    Ok(()) => "Linux's replay leaves the same\n".to_owned(),
                                    Err(error) => format!("Linux's replay: {error:#}\n"),
                                };
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
                        run.name
                    );
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default().len();
    println!(
        "{} seeds, {} cuts, {} of them replayed by Linux, {failures} failures",
        recorded.into_inner(),
        done.into_inner(),
        checked.into_inner()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
