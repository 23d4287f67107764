//! `bench limits`: measures the speeds that no filesystem on this machine can exceed: of copying memory, of computing
//! checksums, and of writing and reading a file on the disk. The file is accessed through crate `device`, as by the
//! engine.

use std::io::IoSlice;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use ubtrfs_device::{Access, AlignedBuf, Device, FileDevice};
use ubtrfs_format::CsumType;

use crate::machine;
use crate::record::Latencies;
use crate::rng::Rng;

/// Measure how fast memory, checksums and a disk are
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Directory on the disk to be measured
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    scratch: PathBuf,
    /// Bytes to write and read
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size, default_value = "1G")]
    bytes: u64,
    /// Number of runs; the medians are printed
    #[arg(short = 'n', long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Do not drop the machine's caches before reading
    #[arg(long)]
    warm: bool,
}

const BLOCK: usize = 1 << 20;
const SMALL: usize = 4096;
const SYNCS: u64 = 200;

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut all: Vec<[(&str, f64); 6]> = Vec::new();
    for _ in 0..args.runs.max(1) {
        all.push(measure(args)?);
    }
    let mut out = serde_json::Map::new();
    out.insert("machine".to_owned(), machine::describe());
    for index in 0..all[0].len() {
        let mut values: Vec<f64> = all.iter().map(|run| run[index].1).collect();
        values.sort_by(f64::total_cmp);
        out.insert(all[0][index].0.to_owned(), values[values.len() / 2].into());
    }
    println!("{:#}", serde_json::Value::Object(out));
    Ok(())
}

fn mib_per_second(bytes: u64, started: Instant) -> f64 {
    bytes as f64 / f64::from(1 << 20) / started.elapsed().as_secs_f64().max(1e-9)
}

fn measure(args: &Args) -> Result<[(&'static str, f64); 6]> {
    let mut block = vec![0; BLOCK];
    Rng::new(1).fill(&mut block);
    let rounds = (args.bytes / BLOCK as u64).max(1);

    // The copies are larger than the processor's caches, so that the speed of memory is measured.
    let mut copies = vec![0; 64 * BLOCK];
    let started = Instant::now();
    for round in 0..rounds {
        let at = (round as usize % 64) * BLOCK;
        copies[at..at + BLOCK].copy_from_slice(&block);
    }
    std::hint::black_box(&copies);
    let copy = mib_per_second(rounds * BLOCK as u64, started);
    let mut csums = Vec::new();
    let started = Instant::now();
    for round in 0..rounds {
        let at = (round as usize % 64) * BLOCK;
        csums.clear();
        CsumType::Crc32c.compute_sectors(&copies[at..at + BLOCK], SMALL, &mut csums);
        std::hint::black_box(&csums);
    }
    let checksum = mib_per_second(rounds * BLOCK as u64, started);

    let file = tempfile::Builder::new().prefix("ubtrfs-bench-").tempfile_in(&args.scratch)?;
    file.as_file().set_len(rounds * BLOCK as u64)?;
    let device = FileDevice::open(file.path(), Access::ReadWrite)?;
    let mut aligned = AlignedBuf::with_capacity(BLOCK);
    aligned.extend_from_slice(&block);
    let started = Instant::now();
    for round in 0..rounds {
        device.write_vectored_at(round * BLOCK as u64, &[IoSlice::new(&aligned)]).context("write")?;
    }
    device.flush().context("flush")?;
    let write = mib_per_second(rounds * BLOCK as u64, started);
    if !args.warm {
        machine::drop_caches_if_root();
    }
    let started = Instant::now();
    for round in 0..rounds {
        device.read_at(round * BLOCK as u64, &mut block).context("read")?;
    }
    let read = mib_per_second(rounds * BLOCK as u64, started);

    let mut latencies = Latencies::new();
    let started = Instant::now();
    for round in 0..SYNCS {
        latencies.time(|| {
            device.write_vectored_at(round * SMALL as u64, &[IoSlice::new(&block[..SMALL])])?;
            Ok(device.flush()?)
        })?;
    }
    let syncs = SYNCS as f64 / started.elapsed().as_secs_f64();
    let p99 = latencies.summary().map_or(0.0, |summary| summary.p99_us);
    Ok([
        ("memory_copy_mib_per_second", copy),
        ("crc32c_mib_per_second", checksum),
        ("file_write_mib_per_second", write),
        ("file_read_mib_per_second", read),
        ("write_and_flush_per_second", syncs),
        ("write_and_flush_p99_us", p99),
    ])
}
