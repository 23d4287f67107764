//! seqwrite, seqread, randwrite and randread: each thread has one file; the sizes of all files add up to `bytes`.

use anyhow::{Result, ensure};

use super::{Params, in_threads};
use crate::record::MeasuredWork;
use crate::rng::{Permutation, Rng};
use crate::target::BenchTarget;

/// The size of each thread's file.
fn share(params: &Params) -> u64 {
    params.bytes / params.threads
}

fn name(thread: u64) -> Vec<u8> {
    format!("data-{thread}").into_bytes()
}

/// Makes a block of bytes that do not compress.
fn random_block(params: &Params, thread: u64) -> Vec<u8> {
    let mut block = vec![0; params.block as usize];
    Rng::new(params.seed ^ thread.rotate_left(32)).fill(&mut block);
    block
}

/// Writes the offset into each page of a block, so that no two blocks of a file are equal.
fn stamp(block: &mut [u8], offset: u64) {
    for page in block.chunks_mut(4096) {
        if let Some(head) = page.first_chunk_mut::<8>() {
            *head = offset.to_le_bytes();
        }
    }
}

pub(super) fn seqwrite<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut block = random_block(params, thread);
        let file = target.create(base, &name(thread), 0o644)?;
        let (mut offset, end) = (0, share(params));
        while offset < end {
            let len = (end - offset).min(params.block);
            stamp(&mut block, offset);
            work.latencies.time(|| target.write(&file, offset, &block[..len as usize]))?;
            offset += len;
            work.ops += 1;
            work.bytes += len;
        }
        Ok(work)
    })
}

pub(super) fn seqread<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut buf = vec![0; params.block as usize];
        let file = target.open(base, &name(thread), false)?;
        loop {
            let count = work.latencies.time(|| target.read(&file, work.bytes, &mut buf));
            let count = count? as u64;
            work.ops += u64::from(count > 0);
            work.bytes += count;
            if count < params.block {
                break;
            }
        }
        ensure!(work.bytes == share(params), "the file has {} bytes, {} were written", work.bytes, share(params));
        Ok(work)
    })
}

/// Writes each block of a new file once, in random order, as fio does with `rw=randwrite` and its random map.
pub(super) fn randwrite<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let file = target.create(base, &name(thread), 0o644)?;
        write_at_random(target, params, thread, &file)
    })
}

/// Writes each block of an existing file once, in random order.
pub(super) fn overwrite<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let file = target.open(base, &name(thread), true)?;
        write_at_random(target, params, thread, &file)
    })
}

/// Overwrites blocks of the file of the first thread at random places, `ops` times.
pub(super) fn overwrite_some<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    let file = target.open(base, &name(0), true)?;
    let mut block = random_block(params, 0);
    let nr_blocks = (params.bytes / params.block).max(1);
    let mut rng = Rng::new(params.seed);
    for _ in 0..params.ops {
        let offset = rng.below(nr_blocks) * params.block;
        stamp(&mut block, offset ^ params.seed);
        target.write(&file, offset, &block)?;
    }
    Ok(())
}

fn write_at_random<T: BenchTarget>(target: &T, params: &Params, thread: u64, file: &T::File) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    let mut block = random_block(params, thread);
    let nr_blocks = share(params) / params.block;
    let order = Permutation::new(nr_blocks, params.seed ^ thread);
    for index in 0..nr_blocks {
        let offset = order.at(index) * params.block;
        stamp(&mut block, offset);
        work.latencies.time(|| target.write(file, offset, &block))?;
        work.ops += 1;
        work.bytes += params.block;
    }
    Ok(work)
}

pub(super) fn randread<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut buf = vec![0; params.block as usize];
        let file = target.open(base, &name(thread), false)?;
        let nr_blocks = (share(params) / params.block).max(1);
        let mut rng = Rng::new(params.seed ^ thread);
        for _ in 0..params.ops / params.threads {
            let offset = rng.below(nr_blocks) * params.block;
            let count = work.latencies.time(|| target.read(&file, offset, &mut buf))?;
            work.ops += 1;
            work.bytes += count as u64;
        }
        Ok(work)
    })
}
