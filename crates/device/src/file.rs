//! Image files and block devices.
//!
//! - I1. The lock (`exclusive_use`) is taken before the size of an existing file or block device is read or changed.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, IoSlice, IoSliceMut, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_format::print::escaped;

use crate::direct::Direct;
use crate::exclusive_use::{
    check_kind, claim_image, claim_soon, lock, lock_parts, refuse_claimed, refuse_mounted_block_device, share_lock,
};
use crate::loop_watch::{LoopWatch, TellLoopEvent};
use crate::mounted;
use crate::open_error::{OpenError, classify, file_size_limit};
use crate::write_gate::WriteGate;
use crate::{Device, check_range, discard};

/// Whether a device is opened for reading only, or also for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading; several readers may share the device.
    ReadOnly,
    /// Reading and writing; excludes all other readers and writers.
    ReadWrite,
}

/// An image file or block device.
#[derive(Debug)]
pub struct FileDevice {
    // Fields are dropped in this order: the claims go before the lock of `file`, so that the next process that gets the
    // lock finds no claim.
    loop_watch: OnceLock<LoopWatch>,
    /// The block device, opened exclusively, while this process holds the kernel's claim on it.
    claim: Mutex<Option<File>>,
    /// Files held open for their locks: for an image, the loop devices over it, so that the kernel cannot mount them;
    /// for a block device, the files and devices that it is made of.
    _held: Vec<File>,
    file: File,
    /// Direct I/O on the file, which large reads and writes use.
    direct: Direct,
    path: PathBuf,
    /// `path` as an absolute path, because the working directory may change.
    full_path: PathBuf,
    len_bytes: AtomicU64,
    access: Access,
    is_block: bool,
    /// Whether this is not a block device that refuses discards.
    can_discard: bool,
    /// Whether the image had a name when it was opened.
    had_name: bool,
    /// See [`Device::is_found`].
    is_found: bool,
    /// Whether a flush failed; then no later flush succeeds (I4 of the crate).
    flush_failed: AtomicBool,
    /// Makes writes wait while another program may have claimed the device.
    writes: WriteGate,
}

impl FileDevice {
    /// Opens an existing image file or block device and locks it.
    pub fn open(path: &Path, access: Access) -> Result<Self, OpenError> {
        Self::open_by(path, path, access)
    }

    /// Works like [`open`](Self::open) for a file that is open, also with `O_PATH`, whatever `path` leads to by now. Without
    /// /proc, opens `path`.
    pub fn open_found(found: impl AsFd, path: &Path, access: Access) -> Result<Self, OpenError> {
        Self::open_by(&way_to(&found, path), path, access)
    }

    /// Opens the file that `way` leads to; messages show `path`.
    fn open_by(way: &Path, path: &Path, access: Access) -> Result<Self, OpenError> {
        let kind = std::fs::metadata(way).map_err(|source| classify(path, access, source))?;
        let is_block = check_kind(path, &kind)?;
        let parts = match is_block {
            true => {
                refuse_mounted_block_device(path, kind.rdev())?;
                if access == Access::ReadWrite && mounted::is_write_protected(kind.rdev()) {
                    return Err(OpenError::WriteProtected { path: path.to_owned() });
                }
                lock_parts(path, access, kind.rdev())?
            }
            false => Vec::new(),
        };
        let opened = File::options().read(true).write(access == Access::ReadWrite).open(way);
        let file = opened.map_err(|source| classify(path, access, source))?;
        let device = Self::from_file(file, path, access, parts)?;
        device.claim().map_err(|source| classify(path, access, source))?;
        match access {
            Access::ReadWrite if is_block => share_lock(&device.file),
            Access::ReadOnly if is_block => refuse_claimed(&device.file, path, &kind)?,
            Access::ReadWrite | Access::ReadOnly => {}
        }
        Ok(device)
    }

    /// Opens an existing image file or block device for reading without a lock, although another process may write to it.
    /// The content can change at any time.
    pub fn open_beside_writer(path: &Path) -> Result<Self, OpenError> {
        Self::open_beside_writer_by(path, path)
    }

    /// Works like [`open_beside_writer`](Self::open_beside_writer) for a file that is open, as
    /// [`open_found`](Self::open_found) does.
    pub fn open_found_beside_writer(found: impl AsFd, path: &Path) -> Result<Self, OpenError> {
        Self::open_beside_writer_by(&way_to(&found, path), path)
    }

    fn open_beside_writer_by(way: &Path, path: &Path) -> Result<Self, OpenError> {
        let access = Access::ReadOnly;
        // Opening a pipe would wait for its writer.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let opened = File::options().read(true).custom_flags(flags).open(way);
        let file = opened.map_err(|source| classify(path, access, source))?;
        let metadata = file.metadata().map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        check_kind(path, &metadata)?;
        Self::from_locked(file, path, access, Vec::new(), &metadata)
    }

    /// Creates a sparse image file of `size_bytes` and opens it read-write. An existing file is refused if
    /// `exclusive_new` is set, and resized otherwise. A block device must be large enough.
    pub fn create(path: &Path, size_bytes: u64, exclusive_new: bool) -> Result<Self, OpenError> {
        if !exclusive_new && path.exists() {
            let mut device = Self::open(path, Access::ReadWrite)?;
            device.resize(size_bytes)?;
            return Ok(device);
        }
        Self::create_new(path, path, size_bytes)
    }

    /// Creates a new image file like [`create`](Self::create), but under a temporary `name` in the directory of `path`.
    /// The caller renames the file to `path` when the content is complete. Messages show `path`.
    pub fn create_under(path: &Path, name: &OsStr, size_bytes: u64) -> Result<Self, OpenError> {
        if path.symlink_metadata().is_ok() {
            return Err(OpenError::Exists { path: path.to_owned() });
        }
        Self::create_new(&parent(path).join(name), path, size_bytes)
    }

    /// Creates a new image file at `path`; messages show `shown`.
    fn create_new(path: &Path, shown: &Path, size_bytes: u64) -> Result<Self, OpenError> {
        let wrap = |source| classify(shown, Access::ReadWrite, source);
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound if !parent(shown).exists() => {
                OpenError::NoDirectory { path: parent(shown).to_owned() }
            }
            // Some directories of the system, such as /proc, take no new files.
            io::ErrorKind::NotFound => OpenError::Io { path: shown.to_owned(), source },
            _ => wrap(source),
        })?;
        let sized =
            file.set_len(size_bytes).and_then(|()| file.sync_all()).and_then(|()| sync_parent(path)).map_err(wrap);
        let opened =
            sized.and_then(|()| Self::from_file(file, path, Access::ReadWrite, Vec::new())).inspect_err(|_| {
                // Remove the new file. Errors of the removal are ignored, because the first error is more useful.
                let _ = std::fs::remove_file(path);
            });
        let full_path = std::path::absolute(shown).unwrap_or_else(|_| shown.to_owned());
        opened.map(|device| Self { path: shown.to_owned(), full_path, ..device })
    }

    /// Locks an open file and makes its device. `parts` are the locked files and devices that a block device is made
    /// of.
    fn from_file(file: File, path: &Path, access: Access, parts: Vec<File>) -> Result<Self, OpenError> {
        let wrap = |source| OpenError::Io { path: path.to_owned(), source };
        let metadata = file.metadata().map_err(wrap)?;
        let is_block = check_kind(path, &metadata)?;
        lock(&file, path, access, &metadata)?;
        let held = match is_block {
            true => parts,
            false => claim_image(path, access, &metadata)?,
        };
        Self::from_locked(file, path, access, held, &metadata)
    }

    /// Makes the device of an open file. `held` are the files that are held open for their locks.
    fn from_locked(
        file: File,
        path: &Path,
        access: Access,
        held: Vec<File>,
        metadata: &Metadata,
    ) -> Result<Self, OpenError> {
        let wrap = |source| OpenError::Io { path: path.to_owned(), source };
        let is_block = metadata.file_type().is_block_device();
        let len_bytes =
            if is_block { (&file).seek(SeekFrom::End(0)).map_err(wrap)? } else { file.metadata().map_err(wrap)?.len() };
        // Check the limit on file sizes now. Otherwise the first write past the limit would fail, long after the
        // filesystem accepted the data.
        if let Some(limit) =
            file_size_limit().filter(|limit| !is_block && access == Access::ReadWrite && *limit < len_bytes)
        {
            return Err(OpenError::SizeLimit { path: path.to_owned(), limit });
        }
        let direct = Direct::open(path, &file, access == Access::ReadWrite);
        let can_discard = !is_block || mounted::takes_discards(metadata.rdev());
        Ok(Self {
            file,
            direct,
            path: path.to_owned(),
            full_path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            len_bytes: AtomicU64::new(len_bytes),
            access,
            is_block,
            can_discard,
            had_name: !is_block && metadata.nlink() > 0,
            is_found: false,
            flush_failed: AtomicBool::new(false),
            claim: Mutex::default(),
            writes: WriteGate::default(),
            _held: held,
            loop_watch: OnceLock::new(),
        })
    }

    /// Notes that the device was found and not named ([`Device::is_found`]).
    #[must_use]
    pub fn found(self) -> Self {
        Self { is_found: true, ..self }
    }

    /// Gives an image file this size. A block device must be large enough.
    pub fn resize(&mut self, size_bytes: u64) -> Result<(), OpenError> {
        if self.is_block {
            if size_bytes > self.len_bytes() {
                return Err(OpenError::TooSmall {
                    path: self.path.clone(),
                    len_bytes: self.len_bytes(),
                    wanted: size_bytes,
                });
            }
            return Ok(());
        }
        let resized = self.file.set_len(size_bytes).and_then(|()| self.file.sync_all());
        resized.map_err(|source| classify(&self.path, Access::ReadWrite, source))?;
        self.len_bytes = AtomicU64::new(size_bytes);
        Ok(())
    }

    /// The path given to open.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What tells devices apart: whether this is a block device, then its `st_rdev` and 0, or the `st_dev` and `st_ino` of
    /// the file.
    pub fn place(&self) -> io::Result<(bool, u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok(if self.is_block { (true, metadata.rdev(), 0) } else { (false, metadata.dev(), metadata.ino()) })
    }

    /// Whether an image file holds anything but zeros. Holes are not read.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn has_content(&self) -> io::Result<bool> {
        has_content(
            self.len_bytes(),
            |at| match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => Ok(data),
                // Nothing but a hole is left.
                Err(Errno::NXIO) => Ok(u64::MAX),
                Err(_) => Ok(at),
            },
            |at, buf| self.file.read_exact_at(buf, at),
        )
    }

    /// Whether the device is a block device.
    pub fn is_block_device(&self) -> bool {
        self.is_block
    }

    /// Waits while writes are paused. Fails if writes are refused.
    fn check_writable(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => self.writes.pass(),
            Access::ReadOnly => Err(Errno::ROFS.into()),
        }
    }

    /// Fails if the image file is shorter than it was at open (I5 of the crate).
    fn check_length(&self) -> io::Result<()> {
        if self.is_block {
            return Ok(());
        }
        // This check runs before every write. Seeking to the end is cheaper than fstat: on a filesystem with multigrain
        // timestamps, reading the timestamps makes the next write update the inode.
        let len_bytes = (&self.file).seek(SeekFrom::End(0))?;
        if len_bytes >= self.len_bytes() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the image was cut to {len_bytes} bytes while it was open, and had {}: unmount it, restore a copy or give it its \
             old size again, and run `ubtrfs check`",
            self.len_bytes()
        )))
    }
}

/// Bytes that are read at once to find content.
const CONTENT_STEP: usize = 1 << 20;

/// Whether a device of `end` bytes holds anything but zeros. `next_data` leads from a place to the next one that may.
pub(crate) fn has_content(
    end: u64,
    next_data: impl Fn(u64) -> io::Result<u64>,
    read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<bool> {
    let mut buf = vec![0; CONTENT_STEP];
    let mut at = next_data(0)?;
    while at < end {
        let len = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX).min(buf.len());
        let piece = &mut buf[..len];
        read(at, piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        at = next_data(at.saturating_add(len as u64))?;
    }
    Ok(false)
}

/// A path that leads to an open file: `path` if there is no /proc.
fn way_to(found: impl AsFd, path: &Path) -> PathBuf {
    let descriptors = Path::new("/proc/self/fd");
    match descriptors.exists() {
        true => descriptors.join(found.as_fd().as_raw_fd().to_string()),
        false => path.to_owned(),
    }
}

/// Makes the name of a new file durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Maximum number of buffers of a system call (`IOV_MAX`).
pub(crate) const NR_BUFS_MAX: usize = 1024;

impl Device for FileDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(offset, buf.len(), self.len_bytes(), io::ErrorKind::UnexpectedEof)?;
        let mut done = 0;
        while done < buf.len() {
            match self.direct.read(offset + done as u64, &mut buf[done..])? {
                0 => return self.file.read_exact_at(&mut buf[done..], offset + done as u64),
                read => done += read,
            }
        }
        Ok(())
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let total = bufs.iter().map(|buf| buf.len()).sum();
        check_range(offset, total, self.len_bytes(), io::ErrorKind::UnexpectedEof)?;
        let mut at = offset;
        let mut rest = bufs;
        IoSliceMut::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let nr_bufs = rest.len().min(NR_BUFS_MAX);
            let read = match self.direct.read_vectored(at, &mut rest[..nr_bufs])? {
                0 => rustix::io::preadv(&self.file, &mut rest[..nr_bufs], at),
                read => Ok(read),
            };
            match read {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    at += read as u64;
                    IoSliceMut::advance_slices(&mut rest, read);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.check_writable()?;
        self.check_length()?;
        let total = bufs.iter().map(|buf| buf.len()).sum();
        check_range(offset, total, self.len_bytes(), io::ErrorKind::WriteZero)?;
        let mut bufs = bufs.to_vec();
        let mut rest = bufs.as_mut_slice();
        let mut at = offset;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let written = match self.direct.write(at, rest)? {
                0 => rustix::io::pwritev(&self.file, &rest[..rest.len().min(NR_BUFS_MAX)], at),
                written => Ok(written),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    at += written as u64;
                    IoSlice::advance_slices(&mut rest, written);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        if self.access == Access::ReadOnly {
            return Ok(());
        }
        // The kernel reports a writeback error only once: the next sync would succeed although data is lost.
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "an earlier flush failed"));
        }
        self.file.sync_data().inspect_err(|_| self.flush_failed.store(true, Ordering::Release))
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        let end = offset.saturating_add(len_bytes).min(self.len_bytes());
        if offset >= end {
            return Ok(());
        }
        match self.is_block {
            true => discard::discard_blocks(&self.file, offset, end - offset),
            false => discard::punch_hole(&self.file, offset, end - offset),
        }
    }

    fn can_discard(&self) -> bool {
        self.can_discard
    }

    fn describe(&self) -> String {
        escaped(self.path.as_os_str().as_encoded_bytes())
    }

    fn location(&self) -> String {
        self.full_path.display().to_string()
    }

    fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }

    fn is_found(&self) -> bool {
        self.is_found
    }

    fn has_io_uring(&self) -> bool {
        self.direct.has_rings()
    }

    fn grow_to_end(&self) -> io::Result<u64> {
        let len_bytes = (&self.file).seek(SeekFrom::End(0))?;
        Ok(self.len_bytes.fetch_max(len_bytes, Ordering::AcqRel).max(len_bytes))
    }

    fn claim(&self) -> io::Result<()> {
        if !self.is_block || self.access == Access::ReadOnly {
            return Ok(());
        }
        let mut claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if claim.is_none() {
            *claim = Some(claim_soon(&self.full_path, self.file.metadata()?.rdev())?);
        }
        Ok(())
    }

    fn release_claim(&self) {
        *self.claim.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn pause_writes(&self) {
        self.writes.pause();
    }

    fn resume_writes(&self, permitted: bool) {
        self.writes.resume(permitted);
    }

    fn watch_loops(&self, tell: TellLoopEvent) -> io::Result<()> {
        // A block device is claimed, and what is only read may be mounted, too.
        if self.is_block || self.access == Access::ReadOnly || self.loop_watch.get().is_some() {
            return Ok(());
        }
        let watch = LoopWatch::start(&way_to(&self.file, &self.full_path), tell)?;
        let _ = self.loop_watch.set(watch);
        Ok(())
    }

    fn check_in_place(&self) -> io::Result<()> {
        // Query the open file, not its path: the link count survives a rename, and a sandboxed process cannot resolve
        // paths.
        if self.had_name && rustix::fs::fstat(&self.file)?.st_nlink == 0 {
            return Err(io::Error::other(
                "the image was removed or replaced while it was open, and ends when it is closed: copy what you need out of \
                 it, then unmount it and restore the image",
            ));
        }
        self.check_length()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AlignedBuf;

    fn image(len_bytes: u64) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        drop(FileDevice::create(&path, len_bytes, true).unwrap());
        (dir, path)
    }

    #[test]
    fn writes_read_back_and_never_extend_the_file() {
        let (_dir, path) = image(1 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        device.write_at(5, b"hello").unwrap();
        let mut buf = [0; 7];
        device.read_at(4, &mut buf).unwrap();
        assert_eq!(&buf, b"\0hello\0");
        assert!(device.write_at((1 << 20) - 2, b"abc").is_err());
        assert!(device.read_at(u64::MAX, &mut buf).is_err());
        device.flush().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    }

    #[test]
    fn vectored_writes_take_more_buffers_than_one_system_call() {
        let (_dir, path) = image(1 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        let parts: Vec<Vec<u8>> = (0..3000usize).map(|n| vec![n as u8; n % 5]).collect();
        let bufs: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        device.write_vectored_at(77, &bufs).unwrap();
        let whole = parts.concat();
        let mut found = vec![0; whole.len()];
        device.read_at(77, &mut found).unwrap();
        assert_eq!(found, whole);
    }

    #[test]
    fn large_writes_work_with_and_without_rings() {
        const LEN: usize = 40 << 20;
        let (_dir, path) = image(64 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        for round in [4, 0, 1, 2, 3u64] {
            if round == 2 {
                device.direct.deny_rings();
                assert!(!device.has_io_uring());
            }
            // One call of a ring cannot transfer all of the data, and buffers do not end where requests end. Round 1
            // has buffers of 4 and 8 KiB. Round 3 adds a buffer whose length is not aligned for direct I/O. Round 4 has
            // buffers of 4 KiB, which are joined.
            let (nr_lens, nr_shifts) = match round {
                1 => (2, 1),
                4 => (1, 1),
                _ => (7, 9),
            };
            let joined_before = device.direct.nr_joined();
            let parts: Vec<AlignedBuf> = (0..)
                .map(|nr: usize| (nr % nr_lens + 1) << (12 + nr % nr_shifts))
                .scan(0, |total, len| {
                    *total += len;
                    (*total <= LEN).then_some(len)
                })
                .chain((round == 3).then_some(100))
                .enumerate()
                .map(|(nr, len)| {
                    let mut part = AlignedBuf::with_capacity(len);
                    part.resize(len);
                    part.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 512 + nr + round as usize) as u8);
                    part
                })
                .collect();
            let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            let bufs: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let offset = (1 << 20) + round * 8192;
            device.write_vectored_at(offset, &bufs).unwrap();
            let has_joined = device.direct.nr_joined() > joined_before;
            assert_eq!(has_joined, round == 4 && device.has_io_uring(), "round {round}");
            let mut found = AlignedBuf::with_capacity(whole.len());
            found.resize(whole.len());
            device.read_at(offset, &mut found).unwrap();
            assert!(found[..] == whole[..], "round {round}");
            assert!(std::fs::read(&path).unwrap()[offset as usize..][..whole.len()] == whole[..], "round {round}");
        }
    }

    #[test]
    fn large_writes_of_several_threads_take_turns() {
        const LEN: usize = 8 << 20;
        let (_dir, path) = image(64 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..6u8 {
                let device = &device;
                scope.spawn(move || {
                    let mut data = AlignedBuf::with_capacity(LEN);
                    data.resize(LEN);
                    for round in 0..4 {
                        data.fill(thread * 4 + round);
                        device.write_at(u64::from(thread) * LEN as u64, &data).unwrap();
                        let mut found = AlignedBuf::with_capacity(LEN);
                        found.resize(LEN);
                        device.read_at(u64::from(thread) * LEN as u64, &mut found).unwrap();
                        assert!(found[..] == data[..]);
                    }
                });
            }
        });
    }

    #[test]
    fn a_second_writer_is_refused_and_readers_share() {
        let (_dir, path) = image(4096);
        let writer = FileDevice::open(&path, Access::ReadWrite).unwrap();
        let refused = FileDevice::open(&path, Access::ReadWrite).unwrap_err();
        assert!(matches!(refused, OpenError::OpenHere { .. }), "{refused}");
        assert!(matches!(FileDevice::open(&path, Access::ReadOnly), Err(OpenError::OpenHere { .. })));
        drop(writer);
        let _first = FileDevice::open(&path, Access::ReadOnly).unwrap();
        let _second = FileDevice::open(&path, Access::ReadOnly).unwrap();
        assert!(matches!(FileDevice::open(&path, Access::ReadWrite), Err(OpenError::OpenHere { .. })));
    }

    #[test]
    fn files_that_are_no_devices_are_refused_by_name() {
        let (dir, path) = image(4096);
        assert!(matches!(FileDevice::open(dir.path(), Access::ReadOnly), Err(OpenError::NotRegular { .. })));
        let missing = dir.path().join("missing");
        assert!(matches!(FileDevice::open(&missing, Access::ReadOnly), Err(OpenError::Missing { .. })));
        assert!(matches!(FileDevice::create(&path, 1, true), Err(OpenError::Exists { .. })));
        let nowhere = missing.join("image");
        assert!(matches!(FileDevice::create(&nowhere, 1, true), Err(OpenError::NoDirectory { .. })));
    }

    #[test]
    fn a_read_only_device_takes_no_writes() {
        let (_dir, path) = image(4096);
        let device = FileDevice::open(&path, Access::ReadOnly).unwrap();
        assert!(device.write_at(0, &[1]).is_err());
        assert!(device.write_vectored_at(0, &[IoSlice::new(&[1])]).is_err());
        assert!(device.discard(0, 4096).is_err());
        device.flush().unwrap();
    }

    #[test]
    fn an_image_that_was_removed_replaced_or_cut_is_not_in_place() {
        let told = |change: &dyn Fn(&Path)| {
            let (dir, path) = image(1 << 20);
            let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
            device.check_in_place().unwrap();
            change(&path);
            drop(dir);
            device.check_in_place().unwrap_err().to_string()
        };
        assert!(told(&|path| std::fs::remove_file(path).unwrap()).contains("removed"));
        let replaced = told(&|path| {
            let other = path.with_extension("new");
            std::fs::write(&other, vec![0; 1 << 20]).unwrap();
            std::fs::rename(other, path).unwrap();
        });
        assert!(replaced.contains("replaced"), "{replaced}");
        let (_dir, path) = image(1 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).unwrap();
        device.check_in_place().unwrap();
        File::options().write(true).open(&moved).unwrap().set_len(70_000).unwrap();
        assert!(device.check_in_place().unwrap_err().to_string().contains("70000"));
        // Both kinds of writes fail: through the page cache and direct.
        assert!(device.write_at(100_000, &[7; 100]).is_err());
        let mut large = AlignedBuf::with_capacity(512 << 10);
        large.resize(512 << 10);
        assert!(device.write_at(256 << 10, &large).is_err());
        assert_eq!(std::fs::metadata(&moved).unwrap().len(), 70_000);
    }

    #[test]
    fn discarded_ranges_of_an_image_become_holes() {
        let (_dir, path) = image(1 << 20);
        let device = FileDevice::open(&path, Access::ReadWrite).unwrap();
        device.write_at(0, &vec![7; 1 << 20]).unwrap();
        device.discard(65536, 1 << 30).unwrap();
        let mut buf = [1; 4096];
        device.read_at(65536, &mut buf).unwrap();
        assert_eq!(buf, [0; 4096]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    }
}
