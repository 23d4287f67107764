//! [`check_cloned`]: receives a chain of snapshots on the filesystem that it was sent from, with sharing.

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::item::InodeFlags;
use ubtrfs_fs::{Caller, Fs, Job, MountOptions, NewInode, ReceiveOptions};

use super::PairRound;
use super::pairs::{open, send_chain};
use super::sharing::{BLOCK, Block, blocks};
use crate::check_medium;
use crate::fs_target::walk_fs_from;
use crate::medium::MediumDevice;
use crate::rng::Rng;
use crate::target::NodeKind;
use crate::tree_entry::{Compare, compare_entries, join, show};

/// Makes a chain of snapshots, sends it, and receives it into another directory of the same filesystem with sharing.
/// Trees must be equal, and each block of data must be at the address at which the sent snapshot has it, except in
/// files without checksums. Returns the total size of the files in bytes, and the number of bytes that the receives
/// shared.
///
/// # Errors
///
/// Fails if anything differs; the error has the seed.
pub fn check_cloned(seed: u64, operations: usize) -> Result<(u64, u64)> {
    let mut rng = Rng::new(seed);
    let (medium, names) = PairRound { seed, operations, by_linux: false, keep: None }.make_chain(&mut rng)?;
    let sent = send_chain(&*open(&medium, "ro")?, &names, &mut rng)?;
    let device = Arc::new(MediumDevice::new(medium));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default())?;
    let copy = fs.create(fs.root(), b"copy", NewInode::dir(0o755), &Caller::ROOT)?.id;
    let options = ReceiveOptions { shares: true, verify: rng.one_in(2), keep: true, ..ReceiveOptions::default() };
    let (mut len_bytes, mut shared) = (0, 0);
    for one in &sent {
        let at = || one.describe(&sent);
        let again = || ReceiveOptions { ended: Arc::default(), ..options.clone() };
        if rng.one_in(3) {
            let cut = rng.index(one.stream.len());
            ensure!(fs.receive(copy, &one.stream[..cut], &again(), &Job::new(), &mut |_| {}).is_err());
        }
        let report = fs
            .receive(copy, &one.stream[..], &again(), &Job::new(), &mut |_| {})
            .map_err(|error| anyhow!("seed {seed}, {}: {error}", at()))?;
        shared += report.bytes_shared;
        let name = one.name.as_bytes();
        let (from, to) = (fs.lookup_path(name, false)?.id, fs.lookup_path(&join(b"copy", name), false)?.id);
        let (from, to) = (walk_fs_from(&fs, from)?, walk_fs_from(&fs, to)?);
        compare_entries(&from, &to, Compare::ALL).map_err(|error| anyhow!("seed {seed}, {}: {error:#}", at()))?;
        for entry in from.iter().filter(|entry| entry.kind == NodeKind::File) {
            let path = join(name, &entry.path);
            let flags = InodeFlags::from_bits_retain(fs.lookup_path(&path, false)?.flags);
            if flags.contains(InodeFlags::NODATASUM) {
                continue;
            }
            len_bytes += entry.size;
            let (before, after) = (blocks(&fs, &path)?, blocks(&fs, &join(b"copy", &path))?);
            // Compare whole blocks only: if a file was longer in the parent, the block in which it ends now cannot be
            // shared.
            for (at, block) in before.iter().filter(|(at, _)| (*at + 1) * BLOCK <= entry.size) {
                // Only data is compared: a receive may replace holes and preallocated blocks by zeros. The other beds
                // compare these.
                let is_shared = !matches!(block, Block::Data(_)) || after.get(at) == Some(block);
                ensure!(
                    is_shared,
                    "seed {seed}: block {at} of {} is {block:?} and {:?}, {}",
                    show(&path),
                    after.get(at),
                    one.describe(&sent)
                );
            }
        }
    }
    fs.close()?;
    check_medium(&device.content())?;
    Ok((len_bytes, shared))
}
