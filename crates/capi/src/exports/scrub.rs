//! Scrub: everything is read and compared with its checksums

use std::ffi::{c_char, c_int};

use ubtrfs::manage::{Damage, ScrubCounts, ScrubOptions, ScrubReport};

use crate::border::{Address, ErrorPlace, Given, GrowingStruct, NumberList, OwnedAddress, ResultPlace};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::{CallResult, answer};
use crate::handles::Handle;
use crate::memory::{KeptTexts, give_struct};

/// Repairs nothing.
pub const UBTRFS_SCRUB_READ_ONLY: u32 = 1;

/// Options of a scrub. Begin with `UBTRFS_SCRUB_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsScrubOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_SCRUB_...`, or 0.
    pub flags: u32,
    /// The number of `devids`.
    pub nr_devids: u32,
    /// The ids of the devices; null for all devices that can be read.
    pub devids: NumberList,
    /// The highest rate for each device; 0 for no limit.
    pub bytes_per_sec: u64,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsScrubOptions {
    const NAME: &'static str = "ubtrfs_scrub_options";
}

impl Given<UbtrfsScrubOptions> {
    fn scrub_options(&self) -> CallResult<ScrubOptions> {
        let given = self.read()?;
        check_flags(given.flags, UBTRFS_SCRUB_READ_ONLY, "the flags of ubtrfs_scrub_options")?;
        Ok(ScrubOptions {
            devices: given.devids.numbers(given.nr_devids as usize, "devids")?,
            repair: given.flags & UBTRFS_SCRUB_READ_ONLY == 0,
            bytes_per_sec: given.bytes_per_sec,
        })
    }
}

/// What was read, and the errors. An error counts sectors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsScrubCounts {
    /// Pieces of data extents.
    pub data_extents: u64,
    /// Tree blocks.
    pub tree_blocks: u64,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Bytes of tree blocks.
    pub tree_bytes: u64,
    /// Sectors that could not be read.
    pub read_errors: u64,
    /// Sectors of data that contradict their checksums.
    pub csum_errors: u64,
    /// Sectors of tree blocks with a wrong checksum, address or generation.
    pub verify_errors: u64,
    /// Sectors without checksums, which are no errors.
    pub nr_without_csum: u64,
    /// Superblocks that are bad or old.
    pub super_errors: u64,
    /// Errors without a good copy.
    pub uncorrectable_errors: u64,
    /// Errors with a good copy elsewhere, from which they are repaired, unless nothing is repaired.
    pub corrected_errors: u64,
    /// Up to this offset of the device, everything was checked.
    pub last_physical: u64,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// A device that was scrubbed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsScrubbedDevice {
    /// The id of the device.
    pub devid: u64,
    /// What was read on the device.
    pub counts: UbtrfsScrubCounts,
    /// Why the scrub of the device did not end normally; null if it did.
    pub message: Address<c_char>,
    /// 0 if everything was checked, -ECANCELED if the scrub was cancelled, or another negative errno.
    pub status: c_int,
    /// Not used: 0.
    pub reserved: u32,
}

/// A file with bad data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDamagedFile {
    /// The id of its subvolume.
    pub subvolume_id: u64,
    /// Its inode number.
    pub ino: u64,
    /// A path from the top level, without a leading slash; null if the file has no name.
    pub path: Address<c_char>,
    /// Bytes that were repaired from a good copy, or that have a good copy if nothing is repaired.
    pub repaired_bytes: u64,
    /// Bytes without a good copy.
    pub lost_bytes: u64,
}

/// The result of a scrub.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsScrubReport {
    /// The devices.
    pub devices: Address<UbtrfsScrubbedDevice>,
    /// The number of `devices`.
    pub nr_devices: usize,
    /// Files with bad data, at most 1000; or null.
    pub files: Address<UbtrfsDamagedFile>,
    /// The number of `files`.
    pub nr_files: usize,
    /// Bytes of tree blocks that were repaired, or that have a good copy if nothing is repaired.
    pub repaired_block_bytes: u64,
    /// Bytes of tree blocks without a good copy.
    pub lost_block_bytes: u64,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// Reads everything on the devices, and repairs what is bad and has a good copy. The report names files with bad data,
/// and how each device ended. Free it with `ubtrfs_free`. Bad data is no failure of this function. Nor is a cancelled
/// scrub: the devices of its report have the status -ECANCELED. Fails with EINPROGRESS if a device is being scrubbed.
/// `options` and `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_scrub(
    fs: Handle<UbtrfsFs>,
    options: Given<UbtrfsScrubOptions>,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<OwnedAddress<UbtrfsScrubReport>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        report.set(OwnedAddress::NULL);
        report.needed("report")?;
        let options = options.scrub_options()?;
        let found = fs.get()?.scrub(&options, &*job_of(job)?)?;
        report.set(shown(&found));
        Ok(())
    })
}

/// Ends the scrubs that other threads run, and waits until they have ended. Fails with ENOTCONN if no scrub runs.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_scrub_cancel(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.cancel_scrub()?))
}

/// The counts of a scrub or of a replacement.
pub(crate) fn counts_of(found: &ScrubCounts) -> UbtrfsScrubCounts {
    UbtrfsScrubCounts {
        data_extents: found.data_extents_scrubbed,
        tree_blocks: found.tree_extents_scrubbed,
        data_bytes: found.data_bytes_scrubbed,
        tree_bytes: found.tree_bytes_scrubbed,
        read_errors: found.read_errors,
        csum_errors: found.csum_errors,
        verify_errors: found.verify_errors,
        nr_without_csum: found.no_csum,
        super_errors: found.super_errors,
        uncorrectable_errors: found.uncorrectable_errors,
        corrected_errors: found.corrected_errors,
        last_physical: found.last_physical,
        more: [0; 4],
    }
}

/// A file with bad data, of a scrub or of a replacement.
pub(crate) fn damaged_file(
    (subvolume_id, ino): (u64, u64),
    path: Option<&[u8]>,
    damage: &Damage,
    texts: &mut KeptTexts,
) -> UbtrfsDamagedFile {
    UbtrfsDamagedFile {
        subvolume_id,
        ino,
        path: texts.keep_optional(path),
        repaired_bytes: damage.repaired_bytes,
        lost_bytes: damage.lost_bytes,
    }
}

fn shown(found: &ScrubReport) -> OwnedAddress<UbtrfsScrubReport> {
    let mut texts = KeptTexts::default();
    let files = found.files.iter();
    let files: Vec<UbtrfsDamagedFile> = files
        .map(|(id, path, damage)| damaged_file((id.root.0, id.ino.0), path.as_deref(), damage, &mut texts))
        .collect();
    let devices = found.devices.iter().map(|device| {
        let failure = device.result.as_ref().err();
        UbtrfsScrubbedDevice {
            devid: device.devid.0,
            counts: counts_of(&device.counts),
            message: texts.keep_optional(failure.map(ToString::to_string)),
            status: failure.map_or(0, |failure| -failure.errno()),
            reserved: 0,
        }
    });
    let devices: Vec<UbtrfsScrubbedDevice> = devices.collect();
    let report = UbtrfsScrubReport {
        devices: Address::of_list(&devices),
        nr_devices: devices.len(),
        files: Address::of_list(&files),
        nr_files: files.len(),
        repaired_block_bytes: found.blocks.repaired_bytes,
        lost_block_bytes: found.blocks.lost_bytes,
        more: [0; 4],
    };
    give_struct(report, (devices, files, texts))
}
