//! Runs power cuts of arrays with lost, stale and noisy devices: records `--seeds` runs of threads, and cuts the power at
//! `--cuts` points of each. With `--bed devices`, devices also join, leave and are replaced, and replacements that a cut
//! has interrupted go on, by us or by Linux. With `--bed events`, block groups are also converted, devices are resized and
//! scrubbed, and parts of a device are overwritten with noise; interrupted conversions go on too. With `--bed members`, a device of an array fails in
//! each run instead, and returns stale.
//!
//! `cargo run --release -p ubtrfs-testkit --example array_cuts -- [--bed cuts|devices|events|members] [--seeds 100] [--cuts 200]
//! [--from 1] [--linux 300] [--threads 2] [--seconds N] [--keep DIR]`
//!
//! With `--linux N`, Linux mounts N of the cuts, degraded if a device is lost, and `btrfs check` checks them. The exit
//! status is 1 if a promise was broken or a check was not clean. `--keep` saves the undamaged devices of the first two
//! failed cuts of each run, and the actions of each thread. Ten seeds in a row use ten combinations of profiles.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ubtrfs_testkit::{ArrayCuts, MemberFaults};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let after = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let number = |name: &str, default: u64| after(name).map_or(default, |text| text.parse().unwrap_or(default));
    let (seeds, cuts, from) = (number("--seeds", 100), number("--cuts", 200), number("--from", 1));
    let (linux, threads, keep) = (number("--linux", 0), number("--threads", 2), after("--keep"));
    let deadline = Instant::now() + Duration::from_secs(number("--seconds", 1 << 30));
    let every = (seeds * cuts).checked_div(linux).map_or(u64::MAX, |every| every.max(1));
    let (next, done, judged) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let failures = Mutex::new(0_u64);
    let fail = |text: String| {
        println!("FAILED {}", text.chars().take(3000).collect::<String>());
        if let Ok(mut failures) = failures.lock() {
            *failures += 1;
        }
    };
    let is_members = after("--bed").is_some_and(|bed| bed == "members");
    let is_changing = after("--bed").is_some_and(|bed| bed == "devices");
    let is_eventful = after("--bed").is_some_and(|bed| bed == "events");
    let (converted, converted_by_linux) = (AtomicU64::new(0), AtomicU64::new(0));
    let hit = AtomicU64::new(0);
    let (resumed, resumed_by_linux) = (AtomicU64::new(0), AtomicU64::new(0));
    let run_members = |seed: u64| match MemberFaults::run(seed) {
        Ok(Some(run)) => {
            done.fetch_add(1, Ordering::Relaxed);
            hit.fetch_add(run.hit.into(), Ordering::Relaxed);
        }
        Ok(None) => fail(format!("seed {seed}: arrays can only be read")),
        Err(error) => fail(format!("{error:#}")),
    };
    let run_seed = |index: u64| {
        let seed = from + index;
        if is_members {
            return run_members(seed);
        }
        let recorded = match (is_changing, is_eventful) {
            (true, _) => ArrayCuts::record_changing(seed),
            (_, true) => ArrayCuts::record_eventful(seed),
            _ => ArrayCuts::record(seed),
        };
        let run = match recorded {
            Ok(Some(run)) => run,
            Ok(None) => return fail(format!("seed {seed}: arrays can only be read")),
            Err(error) => return fail(format!("seed {seed}: {error:#}")),
        };
        let start = Instant::now();
        let mut builder = run.builder();
        let mut nr_bad = 0;
        for (number, point) in (0..).zip(run.points(usize::try_from(cuts).unwrap_or(usize::MAX))) {
            let cut = run.cut(&mut builder, number, point);
            done.fetch_add(1, Ordering::Relaxed);
            let result = run.verify(&cut).and_then(|found| {
                if (index * cuts + number as u64).is_multiple_of(every) {
                    let dir = tempfile::tempdir()?;
                    let is_judged = run.verify_by_linux(&cut, &found, dir.path())?;
                    judged.fetch_add(is_judged.into(), Ordering::Relaxed);
                }
                Ok(())
            });
            let Err(error) = result else { continue };
            nr_bad += 1;
            if let Some(dir) = keep.filter(|_| nr_bad <= 2) {
                let dir = Path::new(dir).join(format!("seed-{seed}-cut-{number}"));
                let kept = std::fs::create_dir_all(&dir).map_err(Into::into).and_then(|()| cut.save(&dir));
                let kept = kept.and_then(|_| Ok(std::fs::write(dir.join("steps.txt"), run.trace())?));
                if let Err(error) = kept {
                    println!("{}: {error:#}", dir.display());
                }
            }
            fail(format!("{error:#}"));
        }
        let (promises, flushes, events) = run.size();
        let (ours, by_linux) = run.nr_resumed();
        resumed.fetch_add(ours, Ordering::Relaxed);
        resumed_by_linux.fetch_add(by_linux, Ordering::Relaxed);
        let (conversions, conversions_by_linux) = run.nr_converted();
        converted.fetch_add(conversions, Ordering::Relaxed);
        converted_by_linux.fetch_add(conversions_by_linux, Ordering::Relaxed);
        println!(
            "seed {seed}: {promises} promises, {flushes} flushes, {events} events, {cuts} cuts in {:.1} s, {nr_bad} bad, \
             {ours} replacements resumed: {}",
            start.elapsed().as_secs_f64(),
            run.name
        );
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= seeds || Instant::now() > deadline {
                        return;
                    }
                    run_seed(index);
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default();
    if is_members {
        println!(
            "{} good runs, the device failed in {} of them, {failures} failures",
            done.into_inner(),
            hit.into_inner()
        );
        return if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    println!(
        "{} cuts, {} of them judged by Linux, {failures} failures; {} replacements went on, {} of them by Linux; \
         {} conversions went on, {} of them by Linux",
        done.into_inner(),
        judged.into_inner(),
        resumed.load(Ordering::Relaxed) + resumed_by_linux.load(Ordering::Relaxed),
        resumed_by_linux.load(Ordering::Relaxed),
        converted.load(Ordering::Relaxed) + converted_by_linux.load(Ordering::Relaxed),
        converted_by_linux.load(Ordering::Relaxed)
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
