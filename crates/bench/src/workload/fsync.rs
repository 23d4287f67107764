//! fsync: each thread appends blocks to its own file and makes each block durable. A latency is the time
//! of one append and its fsync.

use anyhow::Result;

use super::{Params, in_threads};
use crate::record::MeasuredWork;
use crate::rng::Rng;
use crate::target::BenchTarget;

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut block = vec![0; params.block as usize];
        Rng::new(params.seed ^ thread).fill(&mut block);
        let file = target.create(base, format!("log-{thread}").as_bytes(), 0o644)?;
        for _ in 0..params.ops / params.threads {
            work.latencies.time(|| {
                target.write(&file, work.bytes, &block)?;
                target.fsync(&file)
            })?;
            work.ops += 1;
            work.bytes += params.block;
        }
        Ok(work)
    })
}
