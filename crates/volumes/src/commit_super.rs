//! Makes a commit durable on several devices: flushes, superblocks, and the exclusion of devices that fail.
//!
//! ```text
//! commit:  settle failed writes -> flush -> C2 -> primaries, flush -> C3, C2 -> (caller unpins) ; mirrors
//! log:     settle failed writes -> flush -> C4 -> primaries, flush -> C4
//! ```
//!
//! A device that fails a flush, a superblock or a write that no reader can verify is *kicked*: it is not used any more.
//! The other devices go on, if every chunk still has a good copy of each byte. The next two full commits raise the
//! generation without the kicked device, and so mark it as stale for the next open. One commit is not enough, because a
//! power cut between the superblocks of a commit also leaves a device one generation behind.
//!
//! Invariants:
//! - C1. Everything that a superblock refers to was flushed on all members that get the superblock. A failed flush kicks
//!   the member, also if a later flush succeeds.
//! - C2. A member is kicked only if every chunk survives without it. Otherwise the operation fails with the device's
//!   error.
//! - C3. A commit is durable if at least one member in sync, or late, has the superblock durably. Mirrors are written
//!   after that, so a valid durable superblock always exists.
//! - C4. Nothing is promised after a kick before two full commits were made without the member. The same holds for
//!   members that are missing or stale at open. A log does not count, because it does not change the generation.
//! - C5. A stale member gets no superblock before its content is up to date. A late member gets it at once, so that a
//!   loss of the newest member loses nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{DevId, FormatError, Generation, check_superblock};

use crate::chunk_map::Chunk;
use crate::member::{Member, MemberState, Stat};
use crate::set::Volumes;
use crate::superblock;

/// Counts of the events after which the next promise needs two full commits (C4).
#[derive(Debug)]
pub(crate) struct Kicks {
    /// Held while a member is kicked.
    kicking: Mutex<()>,
    /// Number of changes of the members that get superblocks; missing and stale members at open count as one.
    number: AtomicU64,
    /// The number when the last full commit began to write superblocks.
    committed: AtomicU64,
    /// The number when the full commit before that one began to write superblocks.
    committed_twice: AtomicU64,
}

impl Kicks {
    pub(crate) fn new(is_degraded: bool) -> Self {
        let number = AtomicU64::new(is_degraded.into());
        Self { kicking: Mutex::new(()), number, committed: AtomicU64::new(0), committed_twice: AtomicU64::new(0) }
    }

    /// Notes that the members that get superblocks have changed.
    pub(crate) fn count(&self) {
        self.number.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that a full commit is durable that began to write superblocks at this number.
    fn note_commit(&self, nr_kicks: u64) {
        let before = self.committed.swap(nr_kicks, Ordering::AcqRel);
        self.committed_twice.store(before, Ordering::Release);
    }
}

/// The result of writing a superblock with a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPromise {
    /// The log is durable.
    Durable,
    /// A full commit is needed: a member was kicked, or is missing (C4).
    NeedsCommit,
}

impl Volumes {
    /// Makes all completed writes durable on every member (C1).
    ///
    /// # Errors
    ///
    /// The error of a device without which a chunk does not survive (C2).
    pub fn flush(&self) -> Result<()> {
        self.on_members(self.written_members(), flush)
    }

    /// Whether a full commit must be made before the next promise (C4). After a kick this holds until the end of the
    /// second commit.
    pub fn needs_full_commit(&self) -> bool {
        self.kicks.number.load(Ordering::Acquire) != self.kicks.committed_twice.load(Ordering::Acquire)
    }

    /// Writes the superblock to all members in sync and all late ones, and fills in `bytenr`, `dev_item` and `csum` for each
    /// mirror.
    ///
    /// Call [`Volumes::flush`] first, because everything the superblock refers to must be durable. After `Ok`, the
    /// primary superblocks are durable (C3); the mirrors become durable with the next flush. After an error, a later
    /// mount may find the old or the new superblock.
    pub fn write_superblock(&self, sb: &Superblock) -> Result<()> {
        self.check_writable()?;
        self.check_superblocks_are_ours()?;
        if self.holds_superblocks.load(Ordering::Acquire) {
            // E4 of `seed`
            return Ok(());
        }
        let nr_kicks = self.kicks.number.load(Ordering::Acquire);
        debug_assert!(
            self.own_members().iter().all(|member| {
                member.primary.lock().generation().is_none_or(|generation| generation <= sb.generation)
            }),
            "C4: a commit lowers the generation"
        );
        let written = self.write_primaries(sb)?;
        self.kicks.note_commit(nr_kicks);
        for member in &written {
            for offset in &SUPERBLOCK_OFFSETS[1..] {
                // The commit is durable already, so a failed write of a mirror is only counted.
                let _counted = write_mirror(sb, member, *offset);
            }
        }
        self.write_to_twins(sb, &SUPERBLOCK_OFFSETS[1..]);
        Ok(())
    }

    /// Writes `sb`, which differs from the last written superblock in its log root, to the primary superblocks only. On
    /// several devices it gets a number in a field that Linux does not use, so that the latest log is known at open (I4 of
    /// `membership`).
    /// The primary superblocks are durable on return. The mirrors stay at the last commit.
    pub fn write_log_superblock(&self, sb: &Superblock) -> Result<LogPromise> {
        self.check_writable()?;
        self.check_superblocks_are_ours()?;
        if self.needs_full_commit() {
            return Ok(LogPromise::NeedsCommit);
        }
        let mut sb = sb.clone();
        if self.has_several_devices() {
            sb.log_root_transid = self.log_number.fetch_add(1, Ordering::Relaxed);
        }
        self.write_primaries(&sb)?;
        Ok(if self.needs_full_commit() { LogPromise::NeedsCommit } else { LogPromise::Durable })
    }

    /// Writes and flushes the primary superblocks. Returns the members that have it durably.
    fn write_primaries(&self, sb: &Superblock) -> Result<Vec<Arc<Member>>> {
        let members: Vec<Arc<Member>> = self.own_members().into_iter().filter(|member| member.is_complete()).collect();
        members.iter().try_for_each(|member| check_own(sb, member, SUPERBLOCK_OFFSETS[0]).map(drop))?;
        // Until a device in a new place has its superblock, it has one with the device id 0, which Linux refuses beside a
        // replacement that has ended.
        let (promoted, others): (Vec<_>, Vec<_>) = members.iter().cloned().partition(|member| member.is_promoted());
        let sb = Arc::new(sb.clone());
        for wave in [promoted, others] {
            let sb = Arc::clone(&sb);
            self.on_members(wave, move |member| write_primary(&sb, member))?;
        }
        self.write_to_twins(&sb, &SUPERBLOCK_OFFSETS[..1]);
        let written: Vec<Arc<Member>> = members.into_iter().filter(|member| member.is_complete()).collect();
        if written.is_empty() {
            return Err(Error::Bug { what: "C3: no device is in sync".to_owned() });
        }
        Ok(written)
    }

    /// Writes superblocks to the new devices of replacements, after the members have theirs (T8 of `twin`).
    fn write_to_twins(&self, sb: &Superblock, offsets: &[u64]) {
        for member in self.members() {
            let Some(twin) = member.twin() else { continue };
            if !twin.write_superblock(sb, &member, offsets) {
                // Its superblock may have the generation of the others, but not their log.
                self.kicks.count();
            }
        }
    }

    /// The members that get writes.
    fn written_members(&self) -> Vec<Arc<Member>> {
        self.own_members().into_iter().filter(|member| member.takes_writes()).collect()
    }

    /// Works on these members at once, and kicks those for which the work fails.
    fn on_members(
        &self,
        members: Vec<Arc<Member>>,
        work: impl Fn(&Member) -> Result<()> + Clone + Send + 'static,
    ) -> Result<()> {
        let results = self.flush_threads.fan_out(members.clone(), move |member: Arc<Member>| work(&member));
        for (member, result) in members.iter().zip(results) {
            if let Err(error) = result {
                self.kick(member, error)?;
            }
        }
        Ok(())
    }

    /// Stops using a member that failed with `error`.
    ///
    /// # Errors
    ///
    /// Returns `error` if a chunk would not survive without the member (C2).
    pub(crate) fn kick(&self, member: &Member, error: Error) -> Result<()> {
        let _kicking = self.kicks.kicking.lock();
        if member.backend().is_none() {
            return Ok(());
        }
        let is_last = !self.own_members().iter().any(|other| other.is_complete() && other.devid() != member.devid());
        let chunks = self.chunks.all();
        // A late member may lack content (see `member`), so it cannot take the place of another one.
        let counts =
            |other: &Member, has_redundancy| other.is_trusted(has_redundancy) && !(has_redundancy && other.is_late());
        if is_last || !chunks.iter().all(|chunk| self.survives_by(chunk, Some(member), &counts)) {
            return Err(error);
        }
        // A chunk that is being moved stays where it is, unless a commit has recorded the new place: then the old one is
        // given up, and the new one may need this member.
        let targets = chunks.iter().filter_map(|chunk| chunk.target.as_deref());
        let on_member: Vec<_> = targets.filter(|target| target.has_stripe_on(member.devid())).collect();
        if on_member.iter().any(|target| target.is_recorded()) {
            return Err(error);
        }
        on_member.iter().for_each(|target| target.note_failure());
        tracing::error!("{} is not used any more, because it failed: {error}", member.describe());
        member.set_kicked();
        self.kicks.count();
        Ok(())
    }

    /// The members that were behind at open, and their generations.
    pub fn stale_devices(&self) -> Vec<(DevId, Generation)> {
        let of = |member: &Arc<Member>| Some((member.devid(), member.state().behind_at()?));
        self.members().iter().filter_map(of).collect()
    }

    /// Whether a chunk with redundancy has a stripe on the device: only such a stripe can lack content.
    pub fn may_lack_copies(&self, devid: DevId) -> bool {
        let is_on = |chunk: &Arc<Chunk>| chunk.item.stripes.iter().any(|stripe| stripe.devid == devid);
        self.chunks.all().iter().any(|chunk| chunk.geometry.has_redundancy() && is_on(chunk))
    }

    /// Makes a member that was behind one in sync. Its content is up to date and durable. If it has got no superblock (C5),
    /// the next promise needs full commits, which write it.
    pub fn set_in_sync(&self, devid: DevId) {
        if let Some(member) = self.member(devid) {
            debug_assert!(member.state() != MemberState::Missing, "M1: a missing device has no content");
            let lacks_superblock = !member.is_complete();
            member.set_in_sync();
            if lacks_superblock {
                self.kicks.count();
            }
        }
    }

    /// Whether each byte of a chunk has a trusted copy without `lost` (C2).
    pub(crate) fn survives(&self, chunk: &Chunk, lost: Option<&Member>) -> bool {
        self.survives_by(chunk, lost, &Member::is_trusted)
    }

    /// Whether each byte of a chunk has a copy that counts without `lost`. `counts` gets a member, and whether the chunk has
    /// redundancy.
    fn survives_by(&self, chunk: &Chunk, lost: Option<&Member>, counts: &dyn Fn(&Member, bool) -> bool) -> bool {
        let has_redundancy = chunk.geometry.has_redundancy();
        let is_alive = |index: usize| {
            let member = chunk.item.stripes.get(index).and_then(|stripe| self.member(stripe.devid));
            member.is_some_and(|member| {
                let is_lost = lost.is_some_and(|lost| std::ptr::eq(lost, Arc::as_ptr(&member)));
                !is_lost && counts(&member, has_redundancy)
            })
        };
        chunk.geometry.survives(is_alive)
    }
}

fn flush(member: &Member) -> Result<()> {
    if let Some(twin) = member.twin() {
        twin.flush();
    }
    let Some(backend) = member.backend() else { return Ok(()) };
    backend.flush().map_err(|source| {
        member.count(Stat::Flush);
        Error::io("flush", backend.describe(), 0, 0, source)
    })
}

/// The superblock for an offset of a member, checked (I4 of `set`). `None` if it does not fit on the device.
fn check_own(sb: &Superblock, member: &Member, offset: u64) -> Result<Option<Vec<u8>>> {
    let dev_item = member.item.read().clone();
    if !superblock::fits(offset, dev_item.total_bytes) {
        // Without a primary superblock, the commit would be lost.
        return if offset == SUPERBLOCK_OFFSETS[0] { Err(no_room_for_superblock(&dev_item)) } else { Ok(None) };
    }
    debug_assert!(!matches!(member.state(), MemberState::Stale(_)), "C5: a stale device gets a superblock");
    assert!(!member.is_seed(), "E1 of `seed`: a seed device gets a superblock");
    let own = Superblock { bytenr: offset, dev_item, ..sb.clone() };
    let raw = own.encode_with_csum();
    check_superblock(&own, &raw)?;
    Ok(Some(raw))
}

/// Writes the primary superblock of a member, durably. If the device has no durable writes, it is flushed.
fn write_primary(sb: &Superblock, member: &Member) -> Result<()> {
    let Some(backend) = member.backend() else { return Ok(()) };
    let offset = SUPERBLOCK_OFFSETS[0];
    let Some(raw) = check_own(sb, member, offset)? else { return Ok(()) };
    let is_durable = {
        let mut primary = member.primary.lock();
        primary.begin_write();
        let durable = backend.write_durable_at(offset, &raw);
        let is_durable = durable.is_some();
        let written = durable.unwrap_or_else(|| backend.write_at(offset, &raw));
        written.map_err(|source| failed_write(member, backend.describe(), offset, source))?;
        primary.wrote(&raw);
        is_durable
    };
    if !is_durable {
        return flush(member);
    }
    if let Some(twin) = member.twin() {
        twin.flush();
    }
    Ok(())
}

/// Writes another superblock of a member.
fn write_mirror(sb: &Superblock, member: &Member, offset: u64) -> Result<()> {
    let Some(backend) = member.backend() else { return Ok(()) };
    let Some(raw) = check_own(sb, member, offset)? else { return Ok(()) };
    let written = backend.write_at(offset, &raw);
    written.map_err(|source| failed_write(member, backend.describe(), offset, source))
}

fn failed_write(member: &Member, device: String, offset: u64, source: std::io::Error) -> Error {
    member.count(Stat::Write);
    Error::io("write", device, offset, SUPERBLOCK_SIZE as u64, source)
}

pub(crate) fn no_room_for_superblock(item: &DevItem) -> Error {
    let (what, field, value) = ("DevItem", "total_bytes", item.total_bytes);
    FormatError::Value { what, field, value, expected: "expected room for a superblock" }.into()
}
