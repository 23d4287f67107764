//! [`MutationRound`]: streams of a chain of snapshots, changed at random, and received in memory.
//!
//! Commands are swapped, repeated, left out, and moved between streams; lengths, numbers, paths and data in them are
//! changed. The checksums are corrected, so that the receiver does not refuse the changed commands as damaged. A file
//! beside the subvolumes must stay as it is, nothing but subvolumes may appear, the filesystem stays writable, and our
//! checker must find nothing at the end.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use ubtrfs_device::Device;
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode, ReceiveOptions};
use ubtrfs_stream::{HEADER_BYTES, STREAM_HEADER_BYTES};

use super::PairRound;
use super::pairs::{open, send_chain};
use crate::check_medium;
use crate::hostile::mend_checksums;
use crate::medium::{Medium, MediumDevice};
use crate::rng::Rng;

/// One round.
#[derive(Clone, Copy, Debug)]
pub struct MutationRound {
    /// The seed of all random choices.
    pub seed: u64,
    /// Number of changed streams.
    pub nr_streams: u64,
}

/// The number of changed streams of a round, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mutated {
    /// Number of changed streams that were received without an error.
    pub nr_received: u64,
    /// Number of changed streams whose receive failed.
    pub nr_failed: u64,
}

impl MutationRound {
    /// Runs the round.
    ///
    /// # Errors
    ///
    /// Fails if a stream harmed anything; the error has the seed.
    pub fn run(&self) -> Result<Mutated> {
        self.run_with(&mut Rng::new(self.seed)).with_context(|| format!("round of seed {}", self.seed))
    }

    fn run_with(&self, rng: &mut Rng) -> Result<Mutated> {
        let (medium, names) =
            PairRound { seed: self.seed, operations: 8, by_linux: false, keep: None }.make_chain(rng)?;
        let sent = send_chain(&*open(&medium, "ro")?, &names, rng)?;
        let good: Vec<&[u8]> = sent.iter().map(|one| &one.stream[..]).collect();
        let empty = Medium::formatted(256 << 20, &ubtrfs_mkfs::MkfsOptions::default())?;
        let device = Arc::new(MediumDevice::new(empty));
        // The reads below must not change times.
        let options = MountOptions::parse("noatime")?;
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options)?;
        let beside = fs.create(fs.root(), b"beside", NewInode::file(0o644), &Caller::ROOT)?.id;
        fs.write(beside, 0, b"stays as it is")?;
        let into = fs.create(fs.root(), b"into", NewInode::dir(0o755), &Caller::ROOT)?.id;
        let before = fs.getattr(beside)?;
        // Receive the unchanged streams, so that changed incremental streams find their parents.
        for stream in &good[..good.len() - 1] {
            fs.receive(fs.root(), *stream, &ReceiveOptions::default(), &Job::new(), &mut |_| {})
                .map_err(|error| anyhow!("{error}"))?;
        }
        let outside = names_of(&fs, fs.root())?;
        let mut done = Mutated::default();
        for nr in 0..self.nr_streams {
            let stream = mutate(&good, rng);
            let options = ReceiveOptions {
                max_errors: rng.below(3) * 5,
                keep: rng.one_in(4),
                verify: rng.one_in(8),
                shares: rng.one_in(4),
                force_decompress: rng.one_in(8),
                ..ReceiveOptions::default()
            };
            match fs.receive(into, &stream[..], &options, &Job::new(), &mut |_| {}) {
                Ok(_) => done.nr_received += 1,
                Err(_) => done.nr_failed += 1,
            }
            let at = || format!("stream {nr}: {:?}", fs.read_only());
            ensure!(fs.read_only().is_none(), at());
            ensure!(fs.getattr(beside)? == before && fs.read(beside, 0, 100)? == b"stays as it is", at());
            ensure!(names_of(&fs, fs.root())? == outside, at());
            for name in names_of(&fs, into)? {
                fs.delete_subvolume(into, &name, None).with_context(at)?;
            }
        }
        fs.close()?;
        check_medium(&device.content())?;
        Ok(done)
    }
}

fn names_of(fs: &Fs, dir: InodeId) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(entry.name.to_vec());
        }
        true
    })?;
    Ok(names)
}

/// Changes one of the streams.
fn mutate(good: &[&[u8]], rng: &mut Rng) -> Vec<u8> {
    let stream = good[rng.index(good.len())];
    let mut commands: Vec<Vec<u8>> = cut(stream).into_iter().map(<[u8]>::to_vec).collect();
    let other: &[u8] = good[rng.index(good.len())];
    let others = cut(other);
    for _ in 0..1 + rng.below(5) {
        let (at, to) = (rng.index(commands.len()), rng.index(commands.len()));
        match rng.below(12) {
            0 => commands.swap(at, to),
            1 => commands.insert(at, commands[to].clone()),
            2 if commands.len() > 1 => drop(commands.remove(at)),
            3 => commands.insert(at, rng.pick(&others).to_vec()),
            4 => commands.truncate(at + 1),
            _ => change_command(&mut commands[at], rng),
        }
    }
    let mut out = stream[..STREAM_HEADER_BYTES].to_vec();
    commands.iter().for_each(|command| out.extend(command));
    if rng.one_in(50) {
        let at = rng.index(out.len());
        out[at] = rng.next_u64() as u8;
    }
    mend_checksums(&mut out);
    out
}

fn change_command(command: &mut [u8], rng: &mut Rng) {
    // Most of a long command is data. Usually change the start of the command, which has the other attributes.
    let end = if rng.one_in(4) { command.len() } else { command.len().min(HEADER_BYTES + 100) };
    let start = if rng.one_in(20) { 0 } else { HEADER_BYTES.min(end - 1) };
    let at = start + rng.index(end - start);
    match rng.below(6) {
        0 => command[at] = rng.next_u64() as u8,
        1 => command[at] ^= 1 << rng.below(8),
        2 => command[at] = *rng.pick(b"/.s\0"),
        3 => command[at] = *rng.pick(&[0, 1, 0x7f, 0x80, 0xff]),
        // Change the kind of the command.
        4 if command.len() > 5 => command[4] = rng.below(30) as u8,
        _ => {
            let from = start + rng.index(end - start);
            let len = rng.index(12).min(command.len() - at.max(from));
            command.copy_within(from..from + len, at);
        }
    }
}

/// The commands of a stream.
fn cut(stream: &[u8]) -> Vec<&[u8]> {
    let mut commands = Vec::new();
    let mut rest = &stream[STREAM_HEADER_BYTES..];
    while let Some((head, _)) = rest.split_first_chunk::<4>() {
        let (command, after) = rest.split_at(u32::from_le_bytes(*head) as usize + HEADER_BYTES);
        commands.push(command);
        rest = after;
    }
    commands
}
