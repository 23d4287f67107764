//! fsync: each thread appends blocks to its own file and makes each block durable. A latency is the time
//! of one append and its fsync.

use anyhow::Result;

use super::{Params, in_threads};
use crate::record::Work;
use crate::rng::Rng;
use crate::target::Target;

pub(super) fn measure<T: Target>(target: &T, params: &Params, base: &T::Dir) -> Result<Work> {
    in_threads(params.threads, |thread| {
        let mut work = Work::new();
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
