//! Host files that commands write: the targets of `cp` and `export --output`, and the timeline of `mount`.
//!
//! Invariants:
//! - I1. A regular file gets its name only when it is complete. The file is written under a temporary name in the same
//!   directory, and [`HostFile::keep`] renames the file. Until the renaming, an existing file keeps its content.
//!   Without `keep`, or when the program is interrupted and calls [`crate::unfinished::remove_all`], the temporary file
//!   is removed; when the program is killed, it remains.
//! - I2. An image in use is never written, under any path that leads to it.
//! - I3. Devices, FIFOs, and files named as open files of a process (such as `/dev/stdout`) are written in place, never
//!   removed or replaced, except by [`HostFile::replacing`].
//! - I4. [`HostFile::in_dir`] touches only one name in one directory, and follows no links.
//! - I5. Files and directories that a user named are found name by name, and opened by what was found ([`find_target`]). In
//!   a FUSE mount of another user, no link is followed and the mount is not left.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;
use ubtrfs_control::{InMountOfOther, Way, find_file, reopen};

use crate::unfinished::{self, RegisteredFile};
use crate::walk::{check_name, shown};

/// A host file that is being written.
#[derive(Debug)]
pub struct HostFile {
    file: File,
    place: HostOutput,
    /// The number of bytes written so far. Used only for files that are written in order.
    written: u64,
}

#[derive(Debug)]
enum HostOutput {
    /// A device, a FIFO, or an open file of a process (such as `/dev/stdout`), written in order.
    Direct,
    /// A file that gets its final name when it is complete (I1).
    New(TemporaryName),
}

/// A file under a temporary name beside its final name (I1).
#[derive(Debug)]
pub struct TemporaryName {
    dir: Arc<OwnedFd>,
    temporary: String,
    name: Vec<u8>,
    /// Whether the file replaces an existing one.
    replaces: bool,
    kept: bool,
    _noted: Option<RegisteredFile>,
}

impl TemporaryName {
    /// Calls `make` with a temporary name, for a file that will later be renamed to `name` in this directory.
    pub fn make<T, E>(
        dir: &Arc<OwnedFd>,
        name: &[u8],
        replaces: bool,
        make: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<(T, Self), E> {
        let temporary = format!(".ubtrfs-{}", uuid::Uuid::new_v4().simple());
        let (made, noted) = unfinished::make(dir, &temporary, || make(&temporary))?;
        let (dir, name) = (Arc::clone(dir), name.to_vec());
        Ok((made, Self { dir, temporary, name, replaces, kept: false, _noted: noted }))
    }

    /// Renames the complete file to its final name.
    pub fn keep(mut self) -> io::Result<()> {
        let (dir, from, to) = (self.dir.as_fd(), self.temporary.as_str(), self.name.as_slice());
        let flags = if self.replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match rustix::fs::renameat_with(dir, from, dir, to, flags) {
            // The filesystem does not support RENAME_NOREPLACE. An ordinary rename is used, because the name did not
            // exist at the start.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(dir, from, dir, to)?,
            done => done?,
        }
        self.kept = true;
        Ok(())
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        if !self.kept {
            // An error of this call is ignored, because an earlier error is reported.
            let _ = rustix::fs::unlinkat(self.dir.as_fd(), self.temporary.as_str(), AtFlags::empty());
        }
    }
}

impl HostFile {
    /// Opens the file that a user named. Symbolic links are followed.
    pub fn named(path: &Path, mode: u32) -> anyhow::Result<Self> {
        let shown = shown(path);
        if path.as_os_str().as_bytes().ends_with(b"/") && !path.exists() {
            bail!("{shown} is not a directory; make it first, or omit the final slash");
        }
        if ubtrfs_device::stdout_was_closed() && STDOUT_NAMES.iter().any(|name| path == Path::new(name)) {
            bail!("cannot write to {shown}: standard output is closed");
        }
        let Some(found) = find_target(path)? else {
            let (dir, name) = directory_of_new(path)?;
            return Self::in_dir(&dir, name, mode).with_context(|| format!("cannot create {shown}"));
        };
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found).with_context(|| shown.clone())?.st_mode);
        if kind.is_dir() {
            bail!("{shown} is a directory; name a file");
        }
        // As with cp, only a user who may write to the file may replace it.
        let file = reopen(&found, path, File::options().write(true));
        let file = file.with_context(|| format!("cannot write {shown}"))?;
        refuse_in_use(&file, path)?;
        if !kind.is_file() {
            return Ok(Self { file, place: HostOutput::Direct, written: 0 });
        }
        if is_open_file_of_a_process(path) {
            file.set_len(0).with_context(|| format!("cannot write {shown}"))?;
            return Ok(Self { file, place: HostOutput::Direct, written: 0 });
        }
        let real = std::fs::canonicalize(path).with_context(|| shown.clone())?;
        let (dir, name) = directory_of(&real)?;
        let opened = file.metadata().with_context(|| shown.clone())?;
        // Another process may have changed the links after the file was opened. Only the file that was opened may be
        // replaced.
        let found = rustix::fs::statat(&*dir, name, AtFlags::SYMLINK_NOFOLLOW).with_context(|| shown.clone())?;
        if (found.st_dev, found.st_ino) != (opened.dev(), opened.ino()) {
            bail!("{shown} was changed by another program; try again");
        }
        Self::replacement_of(&dir, name, &opened).with_context(|| format!("cannot write {shown}"))
    }

    /// Opens a name in a directory; a symbolic link of that name is replaced (I4).
    pub fn in_dir(dir: &Arc<OwnedFd>, name: &[u8], mode: u32) -> anyhow::Result<Self> {
        check_name(name)?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let stat = match rustix::fs::statat(&**dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                return Self::temporary(dir, name, false, mode);
            }
            Err(error) => return Err(error.into()),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => bail!("it is a directory"),
            FileType::Socket => bail!("it is a socket"),
            FileType::Symlink => Self::temporary(dir, name, true, mode),
            _ => {
                let file = File::from(rustix::fs::openat(&**dir, name, flags, Mode::empty())?);
                refuse_in_use(&file, Path::new(OsStr::from_bytes(name)))?;
                let opened = file.metadata()?;
                if opened.is_file() {
                    return Self::replacement_of(dir, name, &opened);
                }
                Ok(Self { file, place: HostOutput::Direct, written: 0 })
            }
        }
    }

    /// Works like [`HostFile::in_dir`], but also replaces a device, FIFO or socket of that name.
    pub fn replacing(dir: &Arc<OwnedFd>, name: &[u8], mode: u32) -> anyhow::Result<Self> {
        check_name(name)?;
        let found = rustix::fs::statat(&**dir, name, AtFlags::SYMLINK_NOFOLLOW);
        match found.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile | FileType::Directory) | Err(_) => Self::in_dir(dir, name, mode),
            Ok(_) => Self::temporary(dir, name, true, mode),
        }
    }

    /// Makes a file that will replace `name`, with the mode and, if allowed, the owner of the old file.
    fn replacement_of(dir: &Arc<OwnedFd>, name: &[u8], old: &Metadata) -> anyhow::Result<Self> {
        let this = Self::temporary(dir, name, true, 0o600)?;
        let owner = (Some(Uid::from_raw(old.uid())), Some(Gid::from_raw(old.gid())));
        let _not_allowed = rustix::fs::fchown(&this.file, owner.0, owner.1);
        rustix::fs::fchmod(&this.file, Mode::from_raw_mode(old.mode() & 0o777))?;
        Ok(this)
    }

    fn temporary(dir: &Arc<OwnedFd>, name: &[u8], replaces: bool, mode: u32) -> anyhow::Result<Self> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::CREATE | OFlags::EXCL;
        let mode = Mode::from_raw_mode(mode & 0o777);
        let open = |temporary: &str| rustix::fs::openat(&**dir, temporary, flags, mode);
        let (file, place) = TemporaryName::make(dir, name, replaces, open)?;
        Ok(Self { file: file.into(), place: HostOutput::New(place), written: 0 })
    }

    /// Whether the file is written in place instead of being replaced.
    pub fn is_direct(&self) -> bool {
        matches!(self.place, HostOutput::Direct)
    }

    /// Returns the open file, for a caller that writes the whole file in order without `write_at`.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes a piece. Pieces must be written in ascending order; ranges between them read as zeros.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.place {
            HostOutput::Direct => {
                self.write_zeros_up_to(offset)?;
                self.file.write_all(bytes)?;
                self.written += bytes.len() as u64;
                Ok(())
            }
            _ => self.file.write_all_at(bytes, offset),
        }
    }

    /// Sets the file's size after all pieces are written.
    pub fn set_size(&mut self, size: u64) -> io::Result<()> {
        match self.place {
            HostOutput::Direct => self.write_zeros_up_to(size),
            _ => self.file.set_len(size),
        }
    }

    fn write_zeros_up_to(&mut self, end: u64) -> io::Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        while self.written < end {
            let len = ZEROS.len().min(usize::try_from(end - self.written).unwrap_or(ZEROS.len()));
            self.file.write_all(&ZEROS[..len])?;
            self.written += len as u64;
        }
        Ok(())
    }

    /// Makes the data durable. Does nothing for a file that is written in place.
    pub fn sync(&self) -> io::Result<()> {
        match self.place {
            HostOutput::Direct => Ok(()),
            _ => self.file.sync_all(),
        }
    }

    /// Gives the complete file its name (I1).
    pub fn keep(self) -> io::Result<()> {
        match self.place {
            HostOutput::Direct => Ok(()),
            HostOutput::New(name) => name.keep(),
        }
    }
}

impl Write for HostFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Fails for an image that a process has open or the kernel has mounted (I2). Pipes, sockets and character devices are
/// always accepted.
pub(crate) fn refuse_in_use(file: &File, path: &Path) -> anyhow::Result<()> {
    let kind = file.metadata().with_context(|| shown(path))?.file_type();
    if kind.is_file() || kind.is_block_device() {
        ubtrfs_device::refuse_in_use(file, path)?;
    }
    Ok(())
}

/// Finds the file at a path that is to be written (I5). `None` if it does not exist.
pub fn find_target(path: &Path) -> anyhow::Result<Option<OwnedFd>> {
    let shown = shown(path);
    match find_file(path, InMountOfOther::StayInside) {
        Ok(Way::To(found)) => Ok(Some(found)),
        Ok(Way::Nowhere) => match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| shown),
            Ok(_) => bail!("{shown} was changed by another program; try again"),
        },
        Ok(Way::OfOther(user)) => {
            let user = user.map_or_else(|| "another user".to_owned(), |user| format!("user {user}"));
            bail!(
                "{shown} leads through a link or special file in a mount of {user}, which may lead anywhere; name the file \
                 itself, or write it elsewhere"
            )
        }
        Err(error) => bail!("cannot find out through which mounts {shown} leads: {error}"),
    }
}

/// Works like [`directory_of`], for a name that does not exist.
pub fn directory_of_new(path: &Path) -> anyhow::Result<(Arc<OwnedFd>, &[u8])> {
    if std::fs::symlink_metadata(path).is_ok() {
        bail!("{} is a symbolic link that leads nowhere; remove it first", shown(path));
    }
    directory_of(path)
}

/// Opens the directory of a path's last name. Returns the directory and the name.
fn directory_of(path: &Path) -> anyhow::Result<(Arc<OwnedFd>, &[u8])> {
    let name = path
        .file_name()
        .with_context(|| format!("{} does not name a file; give a path that ends in a name", shown(path)))?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((Arc::new(open_dir(dir)?), name.as_bytes()))
}

/// Opens a directory that a user named.
pub(crate) fn open_dir(path: &Path) -> anyhow::Result<OwnedFd> {
    let shown = shown(path);
    let not_a_directory = || anyhow::anyhow!("{shown} is not a directory; check the path");
    let found = find_target(path).map_err(|error| match error.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(io::ErrorKind::NotADirectory) => not_a_directory(),
        _ => error,
    })?;
    let found = found.with_context(|| format!("the directory {shown} does not exist; check the path"))?;
    let stat = rustix::fs::fstat(&found).with_context(|| format!("cannot open {shown}"))?;
    if FileType::from_raw_mode(stat.st_mode).is_dir() { Ok(found) } else { Err(not_a_directory()) }
}

/// Names of standard output. These names are refused if stdout was closed, because Rust then opens /dev/null in place
/// of stdout.
const STDOUT_NAMES: [&str; 3] = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];

/// Whether a path such as `/dev/stdout` leads to an open file. Other writers may share that file and its offset.
fn is_open_file_of_a_process(path: &Path) -> bool {
    ["/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd", "/proc"].iter().any(|start| path.starts_with(start))
}
