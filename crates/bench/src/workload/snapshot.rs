//! snapshot: takes read-only snapshots of a subvolume, one after the other, while threads continuously write files in
//! it. The first snapshot is taken after a quarter of the bytes are written. Only the snapshots are timed. When a file
//! has its maximum size, its writer continues at the file's start.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::Params;
use crate::record::MeasuredWork;
use crate::rng::Rng;
use crate::target::BenchTarget;

const SUBVOLUME: &[u8] = b"subvolume";

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let dir = target.make_subvolume(base, SUBVOLUME)?;
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut work = std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for thread in 0..params.threads {
            let (dir, stop, written) = (&dir, &stop, &written);
            let started = std::thread::Builder::new().name(format!("client-{thread}"));
            let write = move || write_until(target, params, dir, thread, stop, written);
            writers.push(started.spawn_scoped(scope, write).context("cannot start a thread")?);
        }
        let done = snapshots(target, params, base, &stop, &written);
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().map_err(|_| anyhow!("a client thread panicked"))??;
        }
        done
    })?;
    work.bytes = written.into_inner();
    for number in 0..work.ops {
        target.delete_subvolume(base, &name(number))?;
    }
    target.delete_subvolume(base, SUBVOLUME)?;
    Ok(work)
}

fn name(number: u64) -> Vec<u8> {
    format!("snapshot-{number}").into_bytes()
}

/// Takes the snapshots after the writers have written a quarter of the bytes.
fn snapshots<T: BenchTarget>(
    target: &T,
    params: &Params,
    base: &T::Dir,
    stop: &AtomicBool,
    written: &AtomicU64,
) -> Result<MeasuredWork> {
    while written.load(Ordering::Relaxed) < params.bytes / 4 && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut work = MeasuredWork::new();
    let started = Instant::now();
    for number in 0..params.ops {
        work.latencies.time(|| target.snapshot(base, SUBVOLUME, &name(number)))?;
        work.ops += 1;
    }
    work.timed = Some(started.elapsed());
    Ok(work)
}

fn write_until<T: BenchTarget>(
    target: &T,
    params: &Params,
    dir: &T::Dir,
    thread: u64,
    stop: &AtomicBool,
    written: &AtomicU64,
) -> Result<()> {
    let mut block = vec![0; params.block as usize];
    Rng::new(params.seed ^ thread).fill(&mut block);
    let file = target.create(dir, format!("data-{thread}").as_bytes(), 0o644)?;
    let end = (params.bytes / params.threads).max(params.block);
    let mut offset = 0;
    while !stop.load(Ordering::Relaxed) {
        let done = target.write(&file, offset, &block);
        if done.is_err() {
            // After an error, also end the thread that takes the snapshots: it may wait for written data that never
            // comes.
            stop.store(true, Ordering::Relaxed);
        }
        done?;
        written.fetch_add(params.block, Ordering::Relaxed);
        offset += params.block;
        if offset + params.block > end {
            offset = 0;
        }
    }
    Ok(())
}
