//! Extents of files: defragmenting, sharing

use std::ffi::c_int;

use rustix::io::Errno;
use ubtrfs::manage::Defragment;
use ubtrfs::{CompressSpec, File, MountOptions};

use crate::border::{ErrorPlace, Given, GrowingStruct, ResultPlace, Text};
use crate::exports::file::UbtrfsFile;
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::Handle;

/// Also rewrites extents that snapshots or other files share. The file then takes additional space.
pub const UBTRFS_DEFRAGMENT_UNSHARE: u32 = 1;

/// Options of a defragmentation. Begin with `UBTRFS_DEFRAGMENT_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDefragmentOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_DEFRAGMENT_...`, or 0.
    pub flags: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// The begin of the range to defragment.
    pub start: u64,
    /// The end of the range; 0 for the end of the file.
    pub end: u64,
    /// Extents of at least so many bytes stay as they are, unless they are to be compressed; 0 for 32 MiB.
    pub small_bytes: u64,
    /// Compresses what is rewritten: "zlib", "lzo" or "zstd", with a level such as "zstd:9"; or null.
    pub compress: Text,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsDefragmentOptions {
    const NAME: &'static str = "ubtrfs_defragment_options";
}

impl Given<UbtrfsDefragmentOptions> {
    fn defragment(&self) -> CallResult<Defragment> {
        let given = self.read()?;
        check_flags(given.flags, UBTRFS_DEFRAGMENT_UNSHARE, "the flags of ubtrfs_defragment_options")?;
        let usual = Defragment::default();
        Ok(Defragment {
            range: given.start..if given.end == 0 { usual.range.end } else { given.end },
            small_bytes: if given.small_bytes == 0 { usual.small_bytes } else { given.small_bytes },
            compress: given.compress.str("compress")?.map(compression).transpose()?,
            unshare: given.flags & UBTRFS_DEFRAGMENT_UNSHARE != 0,
        })
    }
}

/// The compression that a text means in a mount option.
fn compression(text: &str) -> CallResult<CompressSpec> {
    let parsed = if text.contains(',') { None } else { MountOptions::parse(&format!("compress={text}")).ok() };
    parsed.and_then(|options| options.compress).ok_or_else(|| {
        CallFailure::argument(format!("compress is '{text}'; give zlib, lzo or zstd, with a level after a colon"))
    })
}

/// Joins the small extents of a file, and compresses them if the options say so. `rewritten`, which may be null, gets the
/// number of bytes that were rewritten. The content is intact after every failure. `options` and `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_defragment(
    fs: Handle<UbtrfsFs>,
    path: Text,
    options: Given<UbtrfsDefragmentOptions>,
    job: Handle<UbtrfsJob>,
    rewritten: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let options = options.defragment()?;
        rewritten.set(fs.get()?.defragment(path.path("path")?, &options, &*job_of(job)?)?);
        Ok(())
    })
}

/// Makes a range of `file` share the extents of a range of `source` instead of copying its data. Both ranges begin at
/// multiples of the sector size. `len` is such a multiple too, or ends at the end of `source`; 0 means up to its end. Fails
/// with EBADF if `file` is not open for writing or `source` not for reading, and with EXDEV if they are files of different
/// filesystems.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_clone_range(
    file: Handle<UbtrfsFile>,
    offset: u64,
    source: Handle<UbtrfsFile>,
    source_offset: u64,
    len: u64,
    error: ErrorPlace,
) -> c_int {
    answer(error, || on_two_files(file, source, |file, source| file.clone_range(offset, source, source_offset, len)))
}

/// Compares a range of `file` with a range of `source`, and makes them share extents if they are equal. `are_equal` gets 1
/// if they are, otherwise 0. Ranges and files are as for `ubtrfs_file_clone_range`. `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_dedupe_range(
    file: Handle<UbtrfsFile>,
    offset: u64,
    source: Handle<UbtrfsFile>,
    source_offset: u64,
    len: u64,
    job: Handle<UbtrfsJob>,
    are_equal: ResultPlace<c_int>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        are_equal.needed("are_equal")?;
        let job = job_of(job)?;
        let equal =
            on_two_files(file, source, |file, source| file.dedupe_range(offset, source, source_offset, len, &job))?;
        are_equal.set(equal.into());
        Ok(())
    })
}

/// Calls the library for a file that changes, and a file that is read.
fn on_two_files<T>(
    file: Handle<UbtrfsFile>,
    source: Handle<UbtrfsFile>,
    work: impl FnOnce(&File, &File) -> ubtrfs::Result<T>,
) -> CallResult<T> {
    let (file, source) = (file.get()?, source.get()?);
    if !file.may_write || !source.may_read {
        let problem = "the file is not open for writing, or the source is not open for reading";
        return Err(CallFailure::plain(Errno::BADF, problem.to_owned()));
    }
    if !file.is_on_filesystem_of(&source) {
        return Err(CallFailure::plain(Errno::XDEV, "the files are in different filesystems".to_owned()));
    }
    // The second lock does not wait for threads that wait for it. So two calls with the files in different order, or with
    // one file twice, do not wait for each other.
    let (file, source) = (file.file.read(), source.file.read_recursive());
    Ok(work(&file, &source)?)
}
