//! [`Array`]: the devices of the filesystem, and the map of logical addresses to places on them.
//!
//! The map is the checker's own, so that an error in the engine's map cannot hide itself. Of each profile, the map uses
//! only the facts in `format::Profile`. A striped chunk is mapped element by element. Element number `e` of 64 KiB, with
//! `n` stripes of which `d` hold different data, lies in row `e / d`:
//!
//! | profile | stripe |
//! |---|---|
//! | RAID0 | `e % d` |
//! | RAID10 | the pair `e % d`, one of its two stripes for each copy |
//! | RAID5, RAID6 | `(e % d + row) % n`, so that the parity moves by one stripe in each row |
//!
//! Invariants:
//! - I1. A chunk is in the map only if its fields passed [`check_chunk`]. So the mapping of an address in the chunk does
//!   not overflow.
//! - I2. A device whose UUID differs from its device item and from all stripes is not the device that the chunks mean. It
//!   counts as missing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use ubtrfs_device::Device;
use ubtrfs_error::Error;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem, Stripe};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, FormatError, Logical, Profile};

use crate::members::MemberDevice;
use crate::reader::one_line;

/// The largest length of a chunk. No device is larger, and sums of lengths stay within 64 bits.
const LENGTH_MAX: u64 = 1 << 60;

/// The reason why a copy cannot be read.
#[derive(Debug)]
pub(crate) enum Unreadable {
    /// The copy lies on a device that was not given.
    Missing(DevId),
    /// The device failed, or the address is in no chunk.
    Failed(String),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(devid) => write!(f, "it is on device {devid}, which was not given"),
            Self::Failed(text) => f.write_str(text),
        }
    }
}

/// The range of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkSpan {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Number of readable copies of each byte.
    pub(crate) copies: usize,
    /// Whether the chunk is divided into elements.
    pub(crate) is_striped: bool,
}

/// The devices and the chunks. Several threads read at the same time.
#[derive(Debug)]
pub(crate) struct Array {
    sectorsize: u64,
    members: RwLock<BTreeMap<u64, MemberDevice>>,
    chunks: RwLock<BTreeMap<u64, Arc<ChunkItem>>>,
}

/// A contiguous part of one copy.
struct CopyRun {
    devid: DevId,
    offset: u64,
    len_bytes: u64,
}

impl Array {
    pub(crate) fn new(newest: &Superblock, members: Vec<MemberDevice>) -> Self {
        let by_id = members.into_iter().map(|member| (member.superblock.dev_item.devid.0, member));
        Self {
            sectorsize: newest.sectorsize.max(1).into(),
            members: RwLock::new(by_id.collect()),
            chunks: RwLock::default(),
        }
    }

    /// The given devices, by device id.
    pub(crate) fn members(&self) -> Vec<MemberDevice> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Removes the device of this item if it is another device (I2). Returns whether it was removed.
    pub(crate) fn remove_other(&self, item: &DevItem) -> bool {
        let chunks = self.chunks();
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let Some(member) = members.get(&item.devid.0) else { return false };
        let own = member.superblock.dev_item.uuid;
        let mut stripes = chunks.iter().flat_map(|(_, chunk)| &chunk.stripes);
        let is_other = own != item.uuid && !stripes.any(|stripe| stripe.devid == item.devid && stripe.dev_uuid == own);
        is_other && members.remove(&item.devid.0).is_some()
    }

    /// Whether the given device of this id is the seed device that the item names.
    pub(crate) fn is_seed_of(&self, item: &DevItem) -> bool {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let is_same = |member: &MemberDevice| {
            let own = &member.superblock.dev_item;
            member.is_seed && (own.uuid, own.fsid) == (item.uuid, item.fsid)
        };
        members.get(&item.devid.0).is_some_and(is_same)
    }

    pub(crate) fn has(&self, devid: DevId) -> bool {
        self.device(devid).is_some()
    }

    fn device(&self, devid: DevId) -> Option<Arc<dyn Device>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.get(&devid.0).map(|member| member.device.clone())
    }

    /// Adds a chunk to the map. A chunk that is in the map already may be added again.
    pub(crate) fn add_chunk(&self, start: Logical, item: ChunkItem) -> Result<(), FormatError> {
        check_chunk(start, &item, self.sectorsize)?;
        let mut chunks = self.chunks.write().unwrap_or_else(PoisonError::into_inner);
        let end = start.0.saturating_add(item.length);
        if let Some((&before, known)) = chunks.range(..end).next_back() {
            if before == start.0 && **known == item {
                return Ok(());
            }
            if before.saturating_add(known.length) > start.0 {
                return Err(wrong("logical", start.0, "expected no overlap with another chunk"));
            }
        }
        chunks.insert(start.0, Arc::new(item));
        Ok(())
    }

    /// All chunks, by address.
    pub(crate) fn chunks(&self) -> Vec<(Logical, Arc<ChunkItem>)> {
        let chunks = self.chunks.read().unwrap_or_else(PoisonError::into_inner);
        chunks.iter().map(|(&start, item)| (Logical(start), item.clone())).collect()
    }

    /// The chunk that covers an address.
    pub(crate) fn chunk_at(&self, at: Logical) -> Option<(Logical, Arc<ChunkItem>)> {
        let chunks = self.chunks.read().unwrap_or_else(PoisonError::into_inner);
        let (&start, item) = chunks.range(..=at.0).next_back()?;
        (at.0.saturating_sub(start) < item.length).then(|| (Logical(start), item.clone()))
    }

    /// Whether each byte of a chunk has a copy on a given device, or can be computed from them.
    pub(crate) fn survives(&self, chunk: &ChunkItem) -> bool {
        let has = |stripe: &Stripe| self.has(stripe.devid);
        let Some(profile) = Profile::of(chunk.flags) else { return chunk.stripes.iter().all(has) };
        if profile.sub_stripes > 1 {
            // Each group of mirrors needs one.
            return chunk.stripes.chunks(profile.sub_stripes.into()).all(|mirrors| mirrors.iter().any(has));
        }
        let nr_missing = chunk.stripes.iter().filter(|stripe| !has(stripe)).count();
        nr_missing <= usize::from(profile.tolerated_failures)
    }

    /// The ranges of all chunks, by address.
    pub(crate) fn spans(&self) -> Vec<ChunkSpan> {
        let span = |(start, item): (Logical, Arc<ChunkItem>)| {
            let profile = Profile::of(item.flags);
            ChunkSpan {
                start: start.0,
                end: start.0.saturating_add(item.length),
                copies: profile.map_or(1, |profile| profile.ncopies.into()),
                is_striped: profile.is_some_and(Profile::is_striped),
            }
        };
        self.chunks().into_iter().map(span).collect()
    }

    /// Reads one copy. The number `copy` is below [`ChunkSpan::copies`].
    pub(crate) fn read_copy(&self, at: Logical, buf: &mut [u8], copy: usize) -> Result<(), Unreadable> {
        let (mut at, mut rest) = (at.0, buf);
        while !rest.is_empty() {
            let run = self.run_at(at, rest.len() as u64, copy)?;
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(run.len_bytes as usize);
            let device = self.device(run.devid).ok_or(Unreadable::Missing(run.devid))?;
            device.read_at(run.offset, here).map_err(|source| {
                let error = Error::io("read", device.describe(), run.offset, run.len_bytes, source);
                Unreadable::Failed(one_line(&error))
            })?;
            rest = behind;
            at = at.saturating_add(run.len_bytes);
        }
        Ok(())
    }

    /// Whether the byte at an address has a copy on a given device.
    pub(crate) fn has_copy(&self, at: Logical, copies: usize) -> bool {
        (0..copies).any(|copy| self.run_at(at.0, 1, copy).is_ok_and(|run| self.has(run.devid)))
    }

    /// The device that has this copy of the byte at an address, for messages.
    pub(crate) fn device_of(&self, at: Logical, copy: usize) -> Option<DevId> {
        self.run_at(at.0, 1, copy).ok().map(|run| run.devid)
    }

    /// The place of the longest contiguous part of a copy from an address on, at most `len_bytes` long.
    fn run_at(&self, at: u64, len_bytes: u64, copy: usize) -> Result<CopyRun, Unreadable> {
        let unmapped = || Unreadable::Failed(format!("address {at} is in no chunk"));
        let (start, item) = self.chunk_at(Logical(at)).ok_or_else(unmapped)?;
        let offset = at.saturating_sub(start.0);
        let profile = Profile::of(item.flags).ok_or_else(unmapped)?;
        let (stripe, in_stripe, run_max) = match profile.is_striped() {
            true => locate_element(profile, item.stripes.len() as u64, offset, copy as u64),
            false => (copy as u64, offset, u64::MAX),
        };
        let stripe = usize::try_from(stripe).ok().and_then(|index| item.stripes.get(index)).ok_or_else(unmapped)?;
        Ok(CopyRun {
            devid: stripe.devid,
            offset: stripe.offset.0.saturating_add(in_stripe),
            len_bytes: len_bytes.min(run_max).min(item.length.saturating_sub(offset)),
        })
    }
}

/// Maps an offset in a striped chunk to the index of a stripe, the offset in the stripe, and the bytes from there to the
/// end of the element.
#[allow(clippy::arithmetic_side_effects, reason = "I1: the offset is below 2^60, and there are at most 2^16 stripes")]
fn locate_element(profile: &Profile, nr_stripes: u64, offset: u64, copy: u64) -> (u64, u64, u64) {
    let element_len = ChunkItem::STRIPE_LEN;
    let nr_data = profile.data_stripes(nr_stripes);
    let element = offset / element_len;
    let row = element / nr_data;
    let column = element - row * nr_data;
    let stripe = match profile.flag {
        BlockGroupFlags::RAID10 => column * u64::from(profile.sub_stripes) + copy,
        BlockGroupFlags::RAID5 | BlockGroupFlags::RAID6 => (column + row) % nr_stripes.max(1),
        _ => column,
    };
    let in_element = offset - element * element_len;
    (stripe, row * element_len + in_element, element_len - in_element)
}

fn wrong(field: &'static str, value: u64, expected: &'static str) -> FormatError {
    FormatError::Value { what: "chunk", field, value, expected }
}

/// Checks the fields of a chunk on which the mapping depends (I1).
fn check_chunk(start: Logical, item: &ChunkItem, sectorsize: u64) -> Result<(), FormatError> {
    if item.length == 0 || !item.length.is_multiple_of(sectorsize) {
        return Err(wrong("length", item.length, "expected a multiple of the sector size"));
    }
    if item.length > LENGTH_MAX {
        return Err(wrong("length", item.length, "expected at most 2^60"));
    }
    if !start.0.is_multiple_of(sectorsize) || start.0.checked_add(item.length).is_none() {
        return Err(wrong("logical", start.0, "expected a sector inside the address space"));
    }
    if item.stripe_len != ChunkItem::STRIPE_LEN {
        return Err(wrong("stripe_len", item.stripe_len, "expected 65536"));
    }
    if !item.flags.intersects(BlockGroupFlags::TYPES) {
        return Err(wrong("type", item.flags.bits(), "expected data, metadata or system"));
    }
    let profile =
        Profile::of(item.flags).ok_or_else(|| wrong("type", item.flags.bits(), "expected at most one profile"))?;
    if profile.flag == BlockGroupFlags::RAID10 && item.sub_stripes != profile.sub_stripes {
        return Err(wrong("sub_stripes", item.sub_stripes.into(), "expected 2"));
    }
    if !profile.allows_stripes(item.stripes.len()) {
        return Err(wrong("num_stripes", item.stripes.len() as u64, "expected a number that the profile allows"));
    }
    // The last row of a chunk that has no whole rows ends behind the length of a device extent.
    let stripe_len = item.device_extent_len().saturating_add(ChunkItem::STRIPE_LEN);
    match item.stripes.iter().find(|stripe| stripe.offset.0.checked_add(stripe_len).is_none()) {
        Some(stripe) => Err(wrong("stripe offset", stripe.offset.0, "expected the stripe to end below 2^64")),
        None => Ok(()),
    }
}
