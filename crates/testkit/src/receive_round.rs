//! [`receive_round`]: one chain of snapshots, received by the engine and by Linux.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use tempfile::NamedTempFile;
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::{Fs, Job, MountOptions, ReceiveOptions};

use crate::{Image, LoopMount, SendOptions, SnapshotChain, btrfs_check, receive_by_linux};

/// Makes a chain of snapshots, sends it with Linux, and receives all snapshots except the last with the engine. Linux
/// then receives the last snapshot into the same filesystem. Fails unless all trees are equal to the sent ones, and
/// share as much data as after a receive by Linux alone, and unless both checkers find the filesystem clean. Returns
/// a line about the round. A chain that Linux itself does not receive equal is not judged; the line says so.
///
/// After a failure, the streams are saved in `keep`.
pub fn receive_round(seed: u64, snapshots: usize, operations: usize, keep: Option<&Path>) -> Result<String> {
    let mut chain = SnapshotChain::make(seed, snapshots, operations)?;
    let options = chain.random_options();
    let streams = options
        .iter()
        .enumerate()
        .map(|(index, options)| chain.send(index, options))
        .collect::<Result<Vec<_>>>()
        .with_context(|| format!("send {options:?}"))?;

    let done = receive_chain(seed, &chain, &options, &streams);
    if done.is_err()
        && let Some(dir) = keep
    {
        std::fs::create_dir_all(dir)?;
        for (index, stream) in streams.iter().enumerate() {
            std::fs::copy(stream.path(), dir.join(format!("seed-{seed}-s{index}")))?;
        }
    }
    done
}

fn receive_chain(
    seed: u64,
    chain: &SnapshotChain,
    options: &[SendOptions],
    streams: &[NamedTempFile],
) -> Result<String> {
    let by_linux = Image::kernel_made(1 << 30, &[])?;
    let linux = LoopMount::new(by_linux.path(), "")?;
    for stream in streams {
        // Linux sometimes sends renames in an order that no receiver can apply (seed 70169 with 60 operations).
        if let Err(error) = receive_by_linux(stream.path(), linux.path()) {
            linux.close()?;
            return Ok(format!("not judged, Linux refuses its own stream: {error}"));
        }
    }
    // Linux's send and receive can also make a wrong copy: with seed 70344, the content of one file differs.
    if let Err(error) = chain.compare(linux.path()) {
        linux.close()?;
        return Ok(format!("not judged, Linux's own receive differs: {error:#}"));
    }
    let expected = chain.sharing(linux.path())?;

    let image = Image::kernel_made(1 << 30, &[])?;
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite)?);
    let fs = Fs::open(vec![device], MountOptions::default())?;
    let (last, first) = streams.split_last().context("a chain has snapshots")?;
    let mut nr_commands = 0;
    let receive = |fs: &Fs, input: Box<dyn Read + Send>| {
        fs.receive(fs.root(), input, &ReceiveOptions::default(), &Job::new(), &mut |_| {})
            .map_err(|error| anyhow!("receive {options:?}: {error}"))
    };
    // Some streams are received one by one, and some are joined into one input.
    let mut joined: Box<dyn Read + Send> = Box::new(std::io::empty());
    for (index, stream) in first.iter().enumerate() {
        if (seed + index as u64).is_multiple_of(3) {
            joined = Box::new(joined.chain(File::open(stream.path())?));
            continue;
        }
        let input = std::mem::replace(&mut joined, Box::new(std::io::empty()));
        nr_commands += receive(&fs, Box::new(input.chain(File::open(stream.path())?)))?.nr_commands;
    }
    if (seed + first.len() as u64 - 1).is_multiple_of(3) {
        nr_commands += receive(&fs, joined)?.nr_commands;
    }
    fs.close()?;
    drop(fs);

    btrfs_check(image.path())?;
    let mount = LoopMount::new(image.path(), "")?;
    receive_by_linux(last.path(), mount.path()).context("Linux does not go on from what was received")?;
    chain.compare(mount.path())?;
    let found = chain.sharing(mount.path())?;
    found.check(&expected).with_context(|| format!("{options:?}"))?;
    linux.close()?;
    let complaints = mount.kernel_complaints();
    ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
    mount.scrub()?;
    mount.close()?;
    btrfs_check(image.path())?;
    Ok(format!("{nr_commands} commands, {} bytes of data", found.used))
}
