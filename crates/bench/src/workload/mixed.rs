//! mixed: each thread makes, writes, reads, stats, renames and removes small files at random in its own directory.
//!
//! Of 100 operations 40 read a file, 20 make one, 15 stat one, 10 overwrite a part of one, 10 remove one, 5 rename one.

use anyhow::Result;

use super::{Params, in_threads};
use crate::record::MeasuredWork;
use crate::rng::Rng;
use crate::target::BenchTarget;

/// The number of files of each thread at the start.
const FILES: u64 = 200;
const LARGEST: u64 = 32 << 10;

/// A thread's files, each with its size and the number from which its name is made.
struct ThreadFiles {
    files: Vec<(u64, u64)>,
    next: u64,
}

fn dir_name(thread: u64) -> Vec<u8> {
    format!("mixed-{thread}").into_bytes()
}

fn file_name(number: u64) -> Vec<u8> {
    format!("file-{number:08}").into_bytes()
}

/// The size of a file, computed from its number so that preparation and measurement agree.
fn size_of(params: &Params, number: u64) -> u64 {
    Rng::new(params.seed ^ number.wrapping_mul(31)).below(LARGEST)
}

fn make<T: BenchTarget>(target: &T, dir: &T::Dir, number: u64, data: &[u8]) -> Result<()> {
    let file = target.create(dir, &file_name(number), 0o644)?;
    target.write(&file, 0, data)
}

pub(super) fn prepare<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    let mut data = vec![0; LARGEST as usize];
    Rng::new(params.seed).fill(&mut data);
    for thread in 0..params.threads {
        let dir = target.mkdir(base, &dir_name(thread), 0o755)?;
        for number in 0..FILES {
            make(target, &dir, number, &data[..size_of(params, number) as usize])?;
        }
    }
    Ok(())
}

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut rng = Rng::new(params.seed ^ thread.wrapping_mul(7919));
        let mut data = vec![0; LARGEST as usize];
        rng.fill(&mut data);
        let dir = target.child(base, &dir_name(thread))?;
        let mut files =
            ThreadFiles { files: (0..FILES).map(|number| (number, size_of(params, number))).collect(), next: FILES };
        for _ in 0..params.ops / params.threads {
            let bytes = work.latencies.time(|| step(target, params, &dir, &mut files, &mut rng, &mut data))?;
            work.ops += 1;
            work.bytes += bytes;
        }
        Ok(work)
    })
}

/// Runs one operation and returns the bytes that it read or wrote.
fn step<T: BenchTarget>(
    target: &T,
    params: &Params,
    dir: &T::Dir,
    files: &mut ThreadFiles,
    rng: &mut Rng,
    data: &mut [u8],
) -> Result<u64> {
    let choice = rng.below(100);
    let create = (40..60).contains(&choice) || files.files.is_empty();
    if create {
        let number = files.next;
        let size = size_of(params, number);
        files.next += 1;
        make(target, dir, number, &data[..size as usize])?;
        files.files.push((number, size));
        return Ok(size);
    }
    let at = rng.below(files.files.len() as u64) as usize;
    let (number, size) = files.files[at];
    match choice {
        0..40 => {
            let file = target.open(dir, &file_name(number), false)?;
            Ok(target.read(&file, 0, &mut data[..size as usize])? as u64)
        }
        60..75 => target.stat(dir, &file_name(number)).map(|_| 0),
        75..85 => {
            let file = target.open(dir, &file_name(number), true)?;
            let len = size.min(params.block);
            target.write(&file, rng.below(size - len + 1), &data[..len as usize])?;
            Ok(len)
        }
        85..95 => {
            files.files.swap_remove(at);
            target.unlink(dir, &file_name(number)).map(|()| 0)
        }
        _ => {
            let new = files.next;
            files.next += 1;
            files.files[at].0 = new;
            target.rename(dir, &file_name(number), &file_name(new)).map(|()| 0)
        }
    }
}
