//! [`Twin`]: a device that gets every write to a member at the same offset, so that it can take the member's place.
//!
//! ```text
//! begin_twin -> copy_to_twin, fill_twin for everything that the device has -> (a commit) promote_twin -> end_twin, wipe
//!      |                                                                             |              |
//!      +---------------------------- writes go to both devices ----------------------+--------------+
//!      |
//! resume_twin, at the next open, if that was interrupted
//! ```
//!
//! From the commit that says so in the device tree on, the twin has superblocks with the device id 0, as in Linux.
//!
//! Invariants:
//! - T1. Between the copy of a range and the end, the twin has the content of the member: a write holds the locks of its
//!   pieces shared while it writes to both, and a copy holds them exclusively while it reads from one and writes to the
//!   other. Locks are taken in ascending order.
//! - T2. No write misses the twin: it begins under the exclusive layout lock, which every write holds shared, and while no
//!   migration copies to the member.
//! - T3. A twin that missed a write never takes the member's place, and neither does one that cannot be written then. If it
//!   fails in that commit, the old device keeps its superblocks.
//! - T4. The new member keeps the old device as its twin until the commit that promotes it is durable, and the superblocks
//!   of the old device are wiped. So after a power cut between the superblocks of that commit, the old device has
//!   everything, and is a late member.
//! - T5. The device item of the new device has the generation of that commit. So if both devices have superblocks after a
//!   power cut, the old one is known (I6 of `membership`).
//! - T6. When a commit stores that everything below an offset is copied, a flush of the twin that began after these copies
//!   has succeeded, or the twin does not get the commit's superblock. After a missed write, the next commit stores that
//!   nothing is copied.
//! - T7. The twin of an interrupted replacement is in place before anything is written.
//! - T8. The twin gets a superblock after the members have it, so its superblock is never the newest one. It gets those
//!   with a log, too: Linux may read the log of any device with the newest generation. Without it, nothing is promised
//!   before two full commits have passed it by (C4 of `commit_super`).

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::clock::new_uuid;
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{DevId, Generation, Logical, check_superblock};
use uuid::Uuid;

use crate::device_change::{RemovedDevice, no_device};
use crate::io::{BadUnit, DeviceStripe, Mend, Verify};
use crate::member::Member;
use crate::membership::FoundTarget;
use crate::set::Volumes;
use crate::{signature, superblock};

/// The other device of a member.
#[derive(Debug)]
pub(crate) struct Twin {
    device: Arc<dyn Device>,
    /// Locks of pieces (T1). The number of a piece modulo the number of locks selects the lock.
    pieces: Vec<RwLock<()>>,
    /// The first failure of a write or flush (T3).
    failure: Mutex<Option<Error>>,
    /// The UUID of a new device until it is in its place; `None` for an old one.
    uuid: Option<Uuid>,
    /// Whether the trees tell of the replacement, so that the device gets superblocks.
    is_recorded: AtomicBool,
    /// Everything below this offset of the device is copied, as the running commit stores it.
    copied_to: AtomicU64,
    /// What `copied_to` was when the last flush that succeeded began.
    flushed_to: AtomicU64,
}

impl Twin {
    fn new(device: Arc<dyn Device>, uuid: Option<Uuid>) -> Self {
        let pieces = (0..NR_PIECE_LOCKS).map(|_| RwLock::new(())).collect();
        Self {
            device,
            pieces,
            failure: Mutex::default(),
            uuid,
            is_recorded: AtomicBool::new(false),
            copied_to: AtomicU64::new(0),
            flushed_to: AtomicU64::new(0),
        }
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Keeps these bytes from being copied while the guards are held.
    pub(crate) fn begin_write(&self, offset: u64, len_bytes: u64) -> Vec<RwLockReadGuard<'_, ()>> {
        self.locks_of(offset, len_bytes).map(|lock| lock.read()).collect()
    }

    fn begin_copy(&self, offset: u64, len_bytes: u64) -> Vec<RwLockWriteGuard<'_, ()>> {
        self.locks_of(offset, len_bytes).map(|lock| lock.write()).collect()
    }

    fn locks_of(&self, offset: u64, len_bytes: u64) -> impl Iterator<Item = &RwLock<()>> {
        let first = offset / PIECE_BYTES;
        let last = offset.saturating_add(len_bytes.saturating_sub(1)) / PIECE_BYTES;
        let is_among = move |number: u64| number.wrapping_sub(first) % NR_PIECE_LOCKS <= last.saturating_sub(first);
        (0..).zip(&self.pieces).filter(move |(number, _)| is_among(*number)).map(|(_, lock)| lock)
    }

    /// Writes to the twin. Notes a failure (T3) and returns it, for a member that only has its twin.
    pub(crate) fn write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> Result<()> {
        let written = match bufs {
            [buf] => self.device.write_at(offset, buf),
            bufs => self.device.write_vectored_at(offset, bufs),
        };
        let len_bytes = bufs.iter().map(|buf| buf.len() as u64).fold(0, u64::saturating_add);
        self.noted(written.map_err(|source| Error::io("write", self.device.describe(), offset, len_bytes, source)))
    }

    /// Makes all completed writes durable. A failure is noted.
    pub(crate) fn flush(&self) {
        let copied_to = self.copied_to.load(Ordering::Acquire);
        let flushed = self.device.flush();
        let flushed = flushed.map_err(|source| Error::io("flush", self.device.describe(), 0, 0, source));
        if self.noted(flushed).is_ok() {
            self.flushed_to.store(copied_to, Ordering::Release);
        }
    }

    /// Writes a superblock to the new device of a replacement that the trees tell of. A failure is noted. Returns false if
    /// the device gets no superblocks any more, and has had some.
    pub(crate) fn write_superblock(&self, sb: &Superblock, member: &Member, offsets: &[u64]) -> bool {
        let Some(uuid) = self.uuid else { return true };
        if !self.is_recorded.load(Ordering::Acquire) {
            return true;
        }
        if self.check().is_ok() {
            assert!(
                self.flushed_to.load(Ordering::Acquire) >= self.copied_to.load(Ordering::Acquire),
                "T6: a commit counts copies that were not flushed"
            );
            let dev_item = DevItem { devid: DevId::REPLACEMENT_TARGET, uuid, ..member.item.read().clone() };
            let _noted = self.noted(self.put_superblock(sb, &dev_item, offsets));
        }
        if self.check().is_ok() {
            return true;
        }
        // Without a superblock it counts for nothing (T6).
        self.is_recorded.store(false, Ordering::Release);
        let _failed_anyway = signature::wipe_superblocks(self.device.as_ref());
        false
    }

    fn put_superblock(&self, sb: &Superblock, dev_item: &DevItem, offsets: &[u64]) -> Result<()> {
        for &offset in offsets.iter().filter(|offset| superblock::fits(**offset, dev_item.total_bytes)) {
            let own = Superblock { bytenr: offset, dev_item: dev_item.clone(), ..sb.clone() };
            let raw = own.encode_with_csum();
            check_superblock(&own, &raw)?;
            self.write(offset, &[IoSlice::new(&raw)])?;
        }
        if offsets.first() == SUPERBLOCK_OFFSETS.first() {
            self.flush();
        }
        self.check()
    }

    fn noted(&self, result: Result<()>) -> Result<()> {
        result.inspect_err(|error| {
            self.failure.lock().get_or_insert_with(|| error.clone());
        })
    }

    /// Fails unless the device can be written at the place of its superblock, durably, and is where it was.
    fn check_alive(&self) -> Result<()> {
        let (at, mut raw) = (SUPERBLOCK_OFFSETS[0], vec![0; SUPERBLOCK_SIZE]);
        let read = self.device.read_at(at, &mut raw);
        self.noted(read.map_err(|source| Error::io("read", self.device.describe(), at, raw.len() as u64, source)))?;
        self.write(at, &[IoSlice::new(&raw)])?;
        self.flush();
        let in_place = self.device.check_in_place();
        self.noted(in_place.map_err(|source| Error::io("check", self.device.describe(), 0, 0, source)))?;
        self.check()
    }

    /// The first failure.
    fn check(&self) -> Result<()> {
        self.failure.lock().clone().map_or(Ok(()), Err)
    }
}

/// The error of a change that waits for the end of a replacement of this device, if it is known which one.
pub fn unfinished_replacement(devid: Option<DevId>) -> Error {
    let of = devid.map_or_else(|| "a device".to_owned(), |devid| format!("device {devid}"));
    Error::Refused {
        what: format!("the replacement of {of} is not complete"),
        hint: "mount the filesystem with the new device, and it goes on; or end it: ubtrfs replace cancel",
    }
}

/// The new device of a replacement that was given up.
#[derive(Debug)]
pub struct GivenUpTwin(Arc<Twin>);

impl GivenUpTwin {
    /// Wipes the superblocks. A failure is only logged.
    pub fn wipe(self) {
        if let Err(error) = signature::wipe_superblocks(self.0.device.as_ref()) {
            tracing::warn!("the superblocks of {} could not be wiped: {error}", self.0.device.describe());
        }
    }
}

impl Volumes {
    /// Makes every write to a device also go to `device` (T2), which was wiped and is as large.
    ///
    /// # Errors
    ///
    /// [`Error::BlockGroupBusy`] while a chunk is being moved to the device; [`Error::Refused`] if there is no such device.
    pub fn begin_twin(&self, devid: DevId, device: Arc<dyn Device>) -> Result<()> {
        let uuid = new_uuid(&self.superblock().fsid, &format!("new device {devid}"));
        self.put_twin(devid, device, uuid)
    }

    /// Makes the new device of an interrupted replacement the twin of a device again (T7). Returns false if it was not given,
    /// or cannot take the place.
    ///
    /// # Errors
    ///
    /// As for [`Volumes::begin_twin`].
    pub fn resume_twin(&self, devid: DevId) -> Result<bool> {
        let needed = self.member_for_twin(devid)?.item.read().total_bytes;
        let target = self.target.lock().take();
        let is_usable = |target: &FoundTarget| {
            let is_usable = !target.device.is_read_only() && target.device.len_bytes() >= needed;
            if !is_usable {
                tracing::warn!("{} cannot take the place of device {devid}", target.device.describe());
            }
            is_usable
        };
        let Some(FoundTarget { device, uuid }) = target.filter(is_usable) else {
            // T8: it keeps a superblock of the last commit, or of a later one that has put it in its place.
            self.kicks.count();
            return Ok(false);
        };
        self.put_twin(devid, device, uuid)?;
        Ok(true)
    }

    /// Forgets a given new device of a replacement that has ended.
    pub fn leave_out_target(&self) {
        if let Some(target) = self.target.lock().take() {
            tracing::warn!("{} is not used: its replacement has ended", target.device.describe());
        }
    }

    fn put_twin(&self, devid: DevId, device: Arc<dyn Device>, uuid: Uuid) -> Result<()> {
        self.check_writable()?;
        let member = self.member_for_twin(devid)?;
        let _exclusive = self.layout_lock.write();
        let chunks = self.chunks.all();
        let is_moving_here = |target: &crate::migration::MigrationTarget| target.has_fresh_stripe_on(devid);
        if let Some(moving) = chunks.iter().find(|chunk| chunk.target.as_deref().is_some_and(is_moving_here)) {
            return Err(Error::BlockGroupBusy { start: moving.start(), work: "moved" });
        }
        member.set_twin(Some(Arc::new(Twin::new(device, Some(uuid)))));
        Ok(())
    }

    /// Ends the writes to the other device of a member.
    pub fn end_twin(&self, devid: DevId) {
        let _exclusive = self.layout_lock.write();
        if let Some(member) = self.member(devid) {
            member.set_twin(None);
            member.set_promoted(false);
        }
    }

    /// Notes that the running commit tells of the replacement, and stores that everything below an offset of the device is
    /// copied. Returns the offset that it may store: 0 if the twin missed a write (T6).
    pub fn record_copied(&self, devid: DevId, copied_to: u64) -> u64 {
        let Some(twin) = self.member(devid).and_then(|member| member.twin()) else { return 0 };
        if twin.check().is_err() {
            return 0;
        }
        twin.copied_to.store(copied_to, Ordering::Release);
        twin.is_recorded.store(true, Ordering::Release);
        copied_to
    }

    /// Notes that the running commit tells that the replacement was given up: the twin gets no superblock of it. Returns
    /// the twin, whose superblocks are wiped after the commit.
    pub fn give_up_twin(&self, devid: DevId) -> Option<GivenUpTwin> {
        // An old device is not given up (T4).
        let twin = self.member(devid)?.twin().filter(|twin| twin.uuid.is_some())?;
        twin.is_recorded.store(false, Ordering::Release);
        Some(GivenUpTwin(twin))
    }

    /// Fails if the twin of a device missed a write (T3).
    pub fn check_twin(&self, devid: DevId) -> Result<()> {
        self.twin_of(devid)?.check()
    }

    /// Copies bytes of a stripe to the twin as they are, and leaves them in `buf`.
    ///
    /// # Errors
    ///
    /// An error of the read, also if the stripe is not there any more, or the device is not trusted. Failures of the twin
    /// are told by [`Volumes::check_twin`].
    pub fn copy_to_twin(&self, stripe: &DeviceStripe, offset: u64, buf: &mut [u8]) -> Result<()> {
        let twin = self.twin_of(stripe.devid)?;
        if !self.member(stripe.devid).is_some_and(|member| member.is_in_sync()) {
            return Err(Error::Refused {
                what: format!("device {} is not up to date", stripe.devid),
                hint: "its content is read from other devices",
            });
        }
        let _layout = self.layout_lock.read();
        let physical = stripe.physical.advance(offset).0;
        let _alone = twin.begin_copy(physical, buf.len() as u64);
        self.read_stripe(stripe, offset, buf)?;
        let _noted = twin.write(physical, &[IoSlice::new(buf)]);
        Ok(())
    }

    /// Copies a logical range, which the stripe has a copy of, to the twin: good units from the device itself, bad ones from
    /// other devices. Tells each unit that was bad on the device; if no copy is good, the twin gets what the device has.
    /// `verify` is as in [`Volumes::scrub_range`]. With `avoids_source`, the device is read only where no other copy is
    /// good, and its units count as bad.
    ///
    /// # Errors
    ///
    /// None of a device; failures of the twin are told by [`Volumes::check_twin`].
    pub fn fill_twin(
        &self,
        stripe: &DeviceStripe,
        range: std::ops::Range<u64>,
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
        avoids_source: bool,
        tell: &mut dyn FnMut(BadUnit),
    ) -> Result<()> {
        self.mend_stripe(stripe, range, unit_bytes, verify, Mend::Twin { avoids_source }, tell)
    }

    /// Puts the twin of a device in its place. The running commit stores its item, which has the generation `transid` of
    /// the commit (T5). Returns the old device, which stays the twin of the new one (T4).
    ///
    /// # Errors
    ///
    /// The first failure of the twin (T3).
    pub fn promote_twin(&self, devid: DevId, transid: Generation) -> Result<RemovedDevice> {
        let _exclusive = self.layout_lock.write();
        let old = self.member_for_twin(devid)?;
        let twin = self.twin_of(devid)?;
        twin.check_alive()?;
        let mut item = old.item.read().clone();
        item.generation = transid.0;
        let newest = self.superblock().generation;
        let member = Member::given(item, Arc::clone(&twin.device), (Logical(0), newest), newest);
        member.set_known();
        member.set_promoted(true);
        member.set_twin(old.backend().map(|device| Arc::new(Twin::new(Arc::clone(device), None))));
        self.devices.write().insert(devid.0, Arc::new(member));
        // The members that get superblocks have changed.
        self.kicks.count();
        Ok(RemovedDevice::new(old))
    }

    /// Fails if a device was given up since it took the place of another one.
    pub fn check_promoted(&self, devid: DevId) -> Result<()> {
        let member = self.member_for_twin(devid)?;
        if member.is_complete() {
            return Ok(());
        }
        Err(Error::Refused {
            what: format!("{} failed when it took the place of device {devid}", member.describe()),
            hint: "the old device is whole: unmount the filesystem, and mount it with the old device",
        })
    }

    fn member_for_twin(&self, devid: DevId) -> Result<Arc<Member>> {
        self.member(devid).ok_or_else(|| no_device(devid))
    }

    fn twin_of(&self, devid: DevId) -> Result<Arc<Twin>> {
        let twin = self.member(devid).and_then(|member| member.twin());
        twin.ok_or_else(|| Error::Bug { what: format!("device {devid} has no twin") })
    }
}

/// Bytes of a piece.
const PIECE_BYTES: u64 = 4 << 20;
/// The number of locks, larger than the number of threads that copy at the same time.
const NR_PIECE_LOCKS: u64 = 16;
