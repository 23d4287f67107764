//! Reads the last commit of a filesystem from its devices, also while another process has them open for writing.
//!
//! - C1. Nothing is written, and no log is replayed.
//! - C2. A superblock on disk reaches only blocks that are durable, and a writer overwrites none of them before a newer
//!   superblock is durable. So a reader beside a writer that finds a wrong block reads the superblock again. If it has
//!   changed, the block may have been overwritten, and the reader starts anew. If it has not, the block is damaged.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use ubtrfs_device::{Access, Device, NamedDevice, OpenError};
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, flags};
use uuid::Uuid;

use super::offline::{find_device, in_use, open_device};
use super::place::await_server;
use crate::common::{Shown, warn};
use crate::progs::is_progs;

/// The devices of a filesystem, opened for reading.
pub(crate) struct Committed {
    pub(crate) devices: Vec<Arc<NamedDevice>>,
    /// Whether another process may write to the devices.
    has_writer: bool,
    /// The first superblock of each device, as it was when the devices were opened.
    superblocks: Vec<Vec<u8>>,
}

impl Committed {
    /// Opens the devices. A directory in a mount stands for the image that is mounted there. If another process has a
    /// device open for writing, says so.
    pub(crate) fn open(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut has_writer = false;
        let mut devices = Vec::new();
        for path in paths {
            let path = image_of(path)?;
            await_server(&path)?;
            let Some(found) = find_device(&path)? else {
                // Fails with the reason.
                devices.push(Arc::new(open_device(&path, Access::ReadOnly)?));
                continue;
            };
            let device = match NamedDevice::open_found(found.as_ref(), &path, Access::ReadOnly) {
                Ok(device) => device,
                Err(
                    error @ (OpenError::Locked { .. }
                    | OpenError::BackingInUse { .. }
                    | OpenError::Mounted { .. }
                    | OpenError::Served { .. }),
                ) => {
                    let device = NamedDevice::open_found_beside_writer(found.as_ref(), &path)?;
                    // btrfs-progs read devices that are in use without a word.
                    if !std::mem::replace(&mut has_writer, true) && !is_progs() {
                        warn(&format!("note: {}; this is its last commit, without its log", in_use(&error)));
                    }
                    device
                }
                // Opening once more makes the error with its advice.
                Err(_) => open_device(&path, Access::ReadOnly)?,
            };
            devices.push(Arc::new(device));
        }
        refuse_foreign(&devices)?;
        let superblocks = devices.iter().map(|device| first_superblock(&**device)).collect();
        Ok(Self { devices, has_writer, superblocks })
    }

    /// The devices for readers that take any kind of device.
    pub(crate) fn as_devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
    }

    /// Whether another process may write to the devices.
    pub(crate) fn has_writer(&self) -> bool {
        self.has_writer
    }

    /// Whether a writer has committed since the devices were opened or since the last call that returned true (C2).
    pub(crate) fn has_new_commit(&mut self) -> bool {
        if !self.has_writer {
            return false;
        }
        let now: Vec<Vec<u8>> = self.devices.iter().map(|device| first_superblock(&**device)).collect();
        let is_new = now != self.superblocks;
        self.superblocks = now;
        is_new
    }

    /// Calls `read` until it finds no damage, or no commit that explains the damage (C2). `read` returns its result, and
    /// whether it found damage.
    pub(crate) fn read_consistently<T>(
        &mut self,
        mut read: impl FnMut(Vec<Arc<dyn Device>>) -> anyhow::Result<(T, bool)>,
    ) -> anyhow::Result<T> {
        for _ in 0..TRIES {
            let found = read(self.as_devices());
            let is_damaged = found.as_ref().map_or(true, |(_, is_damaged)| *is_damaged);
            if !is_damaged || !self.has_new_commit() {
                return found.map(|(value, _)| value);
            }
        }
        bail!("the filesystem changes faster than it can be read; try again, or unmount it first")
    }
}

/// How often a reader starts anew.
const TRIES: u32 = 20;

/// The image of a path: the path itself, or the image that is mounted at this directory.
fn image_of(path: &Path) -> anyhow::Result<PathBuf> {
    await_server(path)?;
    if !std::fs::metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(path.to_owned());
    }
    match ubtrfs_fuse::image_mounted_at(path) {
        Some(image) => Ok(image),
        None => bail!("{} is a directory, and not in a mount of yours; name the image or device", path.shown()),
    }
}

/// Fails if a device belongs to another filesystem than most of the devices, and names that device. The first device
/// decides between equal numbers. Devices of seeds are left to whatever opens the filesystem, because others build on them.
pub(crate) fn refuse_foreign(devices: &[Arc<NamedDevice>]) -> anyhow::Result<()> {
    let fsid = |device: &Arc<NamedDevice>| {
        let superblock = Superblock::decode(&first_superblock(&**device)).ok();
        let is_own = |superblock: &Superblock| superblock.magic == MAGIC && superblock.flags & flags::SEEDING == 0;
        superblock.filter(is_own).map(|superblock| superblock.fsid)
    };
    // A device without a superblock is judged by whatever opens the filesystem.
    let found: Vec<_> = devices.iter().filter_map(|device| Some((device, fsid(device)?))).collect();
    let count = |of: &Uuid| found.iter().filter(|(_, fsid)| fsid == of).count();
    let Some((_, usual)) = found.iter().rev().max_by_key(|(_, fsid)| count(fsid)) else { return Ok(()) };
    match found.iter().find(|(_, fsid)| fsid != usual) {
        Some((device, fsid)) => bail!(
            "{} belongs to filesystem {fsid}, not {usual}; give the devices of one filesystem",
            device.path().shown()
        ),
        None => Ok(()),
    }
}

pub(crate) fn first_superblock(device: &dyn Device) -> Vec<u8> {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    let [primary, ..] = SUPERBLOCK_OFFSETS;
    // A device without this block has no commits.
    match device.read_at(primary, &mut raw) {
        Ok(()) => raw,
        Err(_) => Vec::new(),
    }
}
