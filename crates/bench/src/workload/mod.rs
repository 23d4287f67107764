//! The workloads, each written once over [`BenchTarget`]: `prepare` makes the files that a workload needs, and only
//! `measure` is timed.

mod balance;
mod data;
mod database;
mod fsync;
mod mixed;
mod names;
mod send;
mod snapshot;
mod untar;

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

use crate::record::MeasuredWork;
use crate::target::{Admin, BenchTarget};
pub(crate) use send::SentContent;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// Unpack an archive
    Untar,
    /// Make empty files, several threads in several directories
    Fsmark,
    /// Remove a tree (unpacked before)
    Rm,
    /// Walk a tree and stat every name
    Find,
    /// Read every file of a tree, as tar c does
    Readtree,
    /// Read every file of a tree again, from the page cache, as diff -r does
    Reread,
    /// Write a file from start to end
    Seqwrite,
    /// Read a file from start to end
    Seqread,
    /// Write every block of a file once in random order, buffered, in a file larger than memory
    Randwrite,
    /// Read blocks of a file at random places
    Randread,
    /// Append a block and fsync
    Fsync,
    /// Change pages of a table, with a log that each transaction makes durable
    Database,
    /// Create, write, read, stat, rename and remove at random
    Mixed,
    /// Take snapshots of a subvolume while threads write in it
    Snapshot,
    /// Balance a tree with snapshots
    Balance,
    /// Overwrite every block of a file that a snapshot shares, in random order
    Overwrite,
    /// Send a snapshot, whole or only what differs from another snapshot, into /dev/null
    Send,
    /// Receive the stream of a snapshot
    Receive,
}

/// The sizes in the arguments. An omitted size has a default that depends on the workload.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Sizes {
    /// Number of files to make (fsmark, and synthetic archives)
    #[arg(long, value_name = "N")]
    pub(crate) files: Option<u64>,
    /// Number of directories to spread the files over (fsmark)
    #[arg(long, value_name = "N")]
    pub(crate) dirs: Option<u64>,
    /// Number of threads that make requests
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<u64>,
    /// Bytes of file data (seqwrite, seqread, randwrite, randread, database, snapshot, send, receive)
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size)]
    pub(crate) bytes: Option<u64>,
    /// Number of bytes of each read or write
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size)]
    pub(crate) block: Option<u64>,
    /// Number of operations (randread, fsync, database, mixed, snapshot, send, receive)
    #[arg(long, value_name = "N")]
    pub(crate) ops: Option<u64>,
    /// Archive to unpack (untar, rm, find, readtree, reread, send, receive); a synthetic source tree if left out
    #[arg(long, value_name = "FILE")]
    pub(crate) tar: Option<PathBuf>,
    /// Directory of this machine to copy (balance)
    #[arg(long, value_name = "DIR")]
    pub(crate) source: Option<PathBuf>,
    /// Task to measure on the tree (balance)
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) balance: Option<Admin>,
    /// Content of the snapshots (send, receive)
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = SentContent::Tree)]
    pub(crate) of: SentContent,
    /// Send only what differs from an earlier snapshot (send, receive)
    #[arg(long)]
    pub(crate) incremental: bool,
    /// File to store the stream in (receive)
    #[arg(long, value_name = "FILE")]
    pub(crate) stream: Option<PathBuf>,
    /// Enable quotas before the measurement (fsmark, balance, overwrite)
    #[arg(long)]
    pub(crate) quotas: bool,
    /// Number of other threads that keep processors busy during the measurement
    #[arg(long, value_name = "N")]
    pub(crate) busy: Option<u64>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// The sizes of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Params {
    pub(crate) files: u64,
    pub(crate) dirs: u64,
    pub(crate) threads: u64,
    pub(crate) bytes: u64,
    pub(crate) block: u64,
    pub(crate) ops: u64,
    pub(crate) tar: Option<PathBuf>,
    pub(crate) source: PathBuf,
    pub(crate) balance: Admin,
    pub(crate) of: SentContent,
    pub(crate) incremental: bool,
    pub(crate) stream: Option<PathBuf>,
    pub(crate) quotas: bool,
    pub(crate) busy: u64,
    pub(crate) seed: u64,
}

impl Params {
    /// Takes the sizes from the arguments, or the workload's defaults.
    pub(crate) fn new(workload: Workload, sizes: &Sizes) -> Self {
        let (threads, bytes, block, ops) = match workload {
            Workload::Fsmark => (16, 0, 0, 0),
            Workload::Seqwrite | Workload::Seqread => (1, 1 << 30, 1 << 20, 0),
            Workload::Randwrite => (4, 512 << 20, 4096, 0),
            Workload::Randread => (4, 512 << 20, 4096, 50_000),
            Workload::Fsync => (1, 0, 4096, 500),
            Workload::Database => (4, 256 << 20, 8192, 20_000),
            Workload::Mixed => (4, 0, 4096, 50_000),
            Workload::Snapshot => (1, 1 << 30, 4096, 10),
            Workload::Balance => (1, 4 << 30, 4096, 16),
            Workload::Overwrite => (1, 512 << 20, 4096, 0),
            Workload::Send | Workload::Receive => match sizes.of {
                SentContent::Database => (1, 4 << 30, 4096, 500_000),
                SentContent::Tree | SentContent::Snapshots => (1, 0, 4096, 100),
            },
            Workload::Untar | Workload::Rm | Workload::Find | Workload::Readtree | Workload::Reread => (1, 0, 0, 0),
        };
        let files = if workload == Workload::Fsmark { 100_000 } else { 20_000 };
        Self {
            files: sizes.files.unwrap_or(files),
            dirs: sizes.dirs.unwrap_or(16).max(1),
            threads: sizes.threads.unwrap_or(threads).max(1),
            bytes: sizes.bytes.unwrap_or(bytes),
            block: sizes.block.unwrap_or(block).clamp(1, 1 << 30),
            ops: sizes.ops.unwrap_or(ops),
            tar: sizes.tar.clone(),
            source: sizes.source.clone().unwrap_or_else(|| "/usr".into()),
            balance: sizes.balance.unwrap_or(Admin::BalanceMetadata),
            of: sizes.of,
            incremental: sizes.incremental,
            stream: sizes.stream.clone(),
            quotas: sizes.quotas,
            busy: sizes.busy.unwrap_or(0),
            seed: sizes.seed,
        }
    }
}

impl Workload {
    pub(crate) const ALL: [Self; 18] = [
        Self::Untar,
        Self::Fsmark,
        Self::Rm,
        Self::Find,
        Self::Readtree,
        Self::Reread,
        Self::Seqwrite,
        Self::Seqread,
        Self::Randwrite,
        Self::Randread,
        Self::Fsync,
        Self::Database,
        Self::Mixed,
        Self::Snapshot,
        Self::Balance,
        Self::Overwrite,
        Self::Send,
        Self::Receive,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Untar => "untar",
            Self::Fsmark => "fsmark",
            Self::Rm => "rm",
            Self::Find => "find",
            Self::Readtree => "readtree",
            Self::Reread => "reread",
            Self::Seqwrite => "seqwrite",
            Self::Seqread => "seqread",
            Self::Randwrite => "randwrite",
            Self::Randread => "randread",
            Self::Fsync => "fsync",
            Self::Database => "database",
            Self::Mixed => "mixed",
            Self::Snapshot => "snapshot",
            Self::Balance => "balance",
            Self::Overwrite => "overwrite",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }

    /// Whether the workload may unpack an archive, in `measure` or `prepare`.
    pub(crate) fn needs_archive(self) -> bool {
        matches!(self, Self::Untar | Self::Rm | Self::Find | Self::Readtree | Self::Reread | Self::Send | Self::Receive)
    }

    /// Whether `prepare` makes files. If so, the caches must be emptied before `measure`.
    pub(crate) fn has_preparation(self) -> bool {
        matches!(
            self,
            Self::Rm
                | Self::Find
                | Self::Readtree
                | Self::Reread
                | Self::Seqread
                | Self::Randread
                | Self::Database
                | Self::Mixed
                | Self::Balance
                | Self::Overwrite
                | Self::Send
                | Self::Receive
        )
    }

    /// Whether the workload needs subvolumes, which the null server lacks.
    pub(crate) fn needs_subvolumes(self) -> bool {
        matches!(self, Self::Snapshot | Self::Balance | Self::Overwrite | Self::Send | Self::Receive)
    }

    /// Whether the workload's data must exceed memory, which is then limited equally for all sides.
    pub(crate) fn limits_memory(self) -> bool {
        self == Self::Randwrite
    }

    /// Makes the files that `measure` needs in `base`, an empty directory.
    pub(crate) fn prepare<T: BenchTarget>(self, target: &T, params: &Params, base: &T::Dir) -> Result<()> {
        match self {
            Self::Rm | Self::Find | Self::Readtree | Self::Reread => untar::measure(target, params, base).map(drop),
            Self::Seqread | Self::Randread => data::seqwrite(target, params, base).map(drop),
            Self::Database => database::prepare(target, params, base),
            Self::Mixed => mixed::prepare(target, params, base),
            Self::Balance => balance::prepare(target, params, base),
            Self::Overwrite => balance::prepare_overwrite(target, params, base),
            Self::Send => send::prepare_send(target, params, base),
            Self::Receive => send::prepare_receive(target, params, base),
            Self::Fsmark if params.quotas => target.run_task(Admin::EnableQuotas),
            Self::Untar | Self::Fsmark | Self::Seqwrite | Self::Randwrite | Self::Fsync | Self::Snapshot => Ok(()),
        }
    }

    /// Does the work that is timed.
    pub(crate) fn measure<T: BenchTarget>(self, target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
        match self {
            Self::Untar => untar::measure(target, params, base),
            Self::Fsmark => names::fsmark(target, params, base),
            Self::Rm => names::rm(target, base),
            Self::Find => names::find(target, base),
            Self::Readtree => names::read_tree(target, base),
            Self::Reread => names::reread(target, base),
            Self::Seqwrite => data::seqwrite(target, params, base),
            Self::Seqread => data::seqread(target, params, base),
            Self::Randwrite => data::randwrite(target, params, base),
            Self::Randread => data::randread(target, params, base),
            Self::Fsync => fsync::measure(target, params, base),
            Self::Database => database::measure(target, params, base),
            Self::Mixed => mixed::measure(target, params, base),
            Self::Snapshot => snapshot::measure(target, params, base),
            Self::Balance => balance::measure(target, params),
            Self::Overwrite => balance::overwrite(target, params, base),
            Self::Send => send::send(target, params, base),
            Self::Receive => send::receive(target, params, base),
        }
    }

    /// Removes subvolumes that the workload left in `base`.
    pub(crate) fn clean<T: BenchTarget>(self, target: &T, params: &Params, base: &T::Dir) -> Result<()> {
        match self {
            Self::Balance => balance::clean(target, params, base),
            Self::Overwrite => balance::clean(target, &Params { ops: 1, ..params.clone() }, base),
            Self::Send | Self::Receive => send::clean(target, params, base, self == Self::Receive),
            _ => Ok(()),
        }
    }
}

/// Removes everything in a directory.
pub(crate) fn remove_all<T: BenchTarget>(target: &T, dir: &T::Dir) -> Result<()> {
    names::rm(target, dir).map(drop)
}

/// Runs `work(0..threads)` in parallel. Returns the sum of the counts of all threads, or the first error.
fn in_threads(threads: u64, work: impl Fn(u64) -> Result<MeasuredWork> + Sync) -> Result<MeasuredWork> {
    let work = &work;
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for index in 0..threads {
            let thread = std::thread::Builder::new().name(format!("client-{index}"));
            running.push(thread.spawn_scoped(scope, move || work(index)).context("cannot start a thread")?);
        }
        let mut all = MeasuredWork::new();
        for thread in running {
            all.merge(&thread.join().map_err(|_| anyhow!("a client thread panicked"))??);
        }
        Ok(all)
    })
}
