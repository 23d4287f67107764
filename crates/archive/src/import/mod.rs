//! Unpacks an archive into a filesystem.
//!
//! Invariants:
//! - I1. Nothing outside the target directory is made or changed. Paths are resolved name by name. Symbolic links on
//!   the way are resolved as if the directory that the archive is unpacked into were the root directory.
//! - I2. The times of a directory and its inheritable extended attributes (the default ACL and the `btrfs.` properties)
//!   are set at the end, after the last change in it. Otherwise new files would change the directory's times and
//!   inherit these attributes.
//! - I3. As in tar, a member that cannot be unpacked is reported and skipped. Errors that would also affect the other
//!   members end the import ([`is_fatal`]); the first such error in archive order is reported.
//! - I4. Data that is kept until the end takes at most [`HELD_MAX`] bytes. This data is the times and inheritable
//!   attributes of directories (I2) and, if the archive is a layer, the names that the layer added.
//! - I5. If a member must replace an existing file, the member is first made under a temporary name, with its data and
//!   attributes (a directory without attributes). The existing file is removed only after that, so a failed member
//!   removes nothing.

mod contents;
mod layer;

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::io::Errno;
use ubtrfs_fs::{Caller, Error, Fs, InodeId, NewInode, RenameFlags, SetAttr, SetTime, mode, rdev_from_parts};

use self::contents::{Contents, ContentsThread};
use self::layer::Layer;
use crate::glob::matches;
use crate::tar::input::ArchiveInput;
use crate::tar::read::ArchiveReader;
use crate::tar::{ArchiveMember, MemberKind, acl};
use crate::walk::{join, normal_names, printable, shown, temporary_name};
use crate::{ArchiveMessage, Watch};

/// An archive whose first header has been read.
pub struct Archive {
    reader: ArchiveReader,
    first: Option<ArchiveMember>,
    /// The archive's name for messages.
    name: String,
    total_bytes: Option<u64>,
}

impl std::fmt::Debug for Archive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Archive {
    /// Opens an archive file, plain or compressed with gzip, xz, zstd, bzip2 or lz4, and reads its first header.
    ///
    /// # Errors
    /// The file cannot be read, or is not a tar archive.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::begin(ArchiveInput::open(path)?, path)
    }

    /// Starts to read an archive from a stream, which another thread reads ahead. Messages call the archive `name`.
    ///
    /// # Errors
    /// The stream cannot be read, or is not a tar archive.
    pub fn from_reader(source: impl Read + Send + 'static, name: &Path) -> anyhow::Result<Self> {
        Self::begin(ArchiveInput::stream(source, name)?, name)
    }

    fn begin(input: ArchiveInput, path: &Path) -> anyhow::Result<Self> {
        let (name, total_bytes) = (shown(path), input.total());
        let mut reader = ArchiveReader::new(input);
        let first = reader.next_member().with_context(|| name.clone())?;
        Ok(Self { reader, first, name, total_bytes })
    }

    /// The length of the archive file in bytes, if it is known.
    pub fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }
}

/// Options of [`import()`].
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The number of leading names to remove from each path.
    pub strip_components: usize,
    /// User and group that own every file; `None` for the owners in the archive.
    pub owner: Option<(u32, u32)>,
    /// User and group that own directories that are not in the archive, if `owner` is `None`.
    pub dir_owner: (u32, u32),
    /// Whether the archive is a layer of an OCI image, whose whiteouts (`.wh.NAME`, `.wh..wh..opq`) remove existing
    /// files.
    pub oci_layer: bool,
    /// Patterns of members that are left out, with everything below them. A pattern matches a name, or several
    /// consecutive names if it has slashes, anywhere in the path ([`crate::glob`]). Nothing matches a slash but a slash.
    pub exclude: Vec<Vec<u8>>,
    /// Text before the target's path in messages, such as `disk.img:`.
    pub place: String,
}

/// The numbers of members and attributes that an import unpacked, and of members that it skipped. A member that failed
/// may be counted both in `failed` and in the count of its kind.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct ImportReport {
    /// Unpacked members.
    pub entries: u64,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Hard links.
    pub hard_links: u64,
    /// Device files.
    pub devices: u64,
    /// Named pipes.
    pub fifos: u64,
    /// Extended attributes.
    pub xattrs: u64,
    /// Whiteouts of a layer.
    pub whiteouts: u64,
    /// Bytes of file data, without holes.
    pub bytes: u64,
    /// Members that were reported and skipped.
    pub failed: u64,
}

/// Unpacks an archive into the directory `target`, which is made if it does not exist. Starts commits in the
/// background, but the last changes are not committed on return.
///
/// # Errors
/// The archive is damaged, or an error affects all members, such as a lack of space. A member that cannot be unpacked
/// is reported as [`ArchiveMessage::Failed`], counted, and skipped.
pub fn import(
    fs: &Fs,
    archive: &mut Archive,
    target: &[u8],
    options: &ImportOptions,
    watch: Watch<'_>,
) -> anyhow::Result<ImportReport> {
    let target_name = format!("{}{}", options.place, printable(target));
    let job = ImportContext { options, watch, archive: archive.name.clone(), target: target_name };
    let mut import = Import::new(fs, &job, target)?;
    let first = archive.first.take();
    import.run(&mut archive.reader, first)?;
    Ok(import.counts)
}

/// The parts of an import that do not change while it runs. The main thread and the separate thread use them.
struct ImportContext<'a> {
    options: &'a ImportOptions,
    watch: Watch<'a>,
    /// The archive's name.
    archive: String,
    /// The target's name.
    target: String,
}

impl ImportContext<'_> {
    /// Reports a skipped member, unless its error ends the import (I3).
    fn report_skipped(&self, error: anyhow::Error) -> anyhow::Result<()> {
        if is_fatal(&error) {
            return Err(error);
        }
        (self.watch)(ArchiveMessage::Failed(&error));
        Ok(())
    }

    /// Whether a member with these names is left out.
    fn is_excluded(&self, names: &[&[u8]]) -> bool {
        self.options.exclude.iter().any(|pattern| {
            let parts = normal_names(pattern);
            let matches_at = |at: &[&[u8]]| parts.iter().zip(at).all(|(part, name)| matches(part, name));
            !parts.is_empty() && names.windows(parts.len()).any(matches_at)
        })
    }

    fn cannot_import(&self, path: &[u8]) -> String {
        format!("cannot import '{}' of {} into {}", printable(path), self.archive, self.target)
    }

    /// The owner of directories that are not in the archive.
    fn dir_caller(&self) -> Caller {
        let (uid, gid) = self.options.owner.unwrap_or(self.options.dir_owner);
        Caller { uid, gid, umask: 0 }
    }
}

fn charge(left: &mut usize, bytes: usize) -> anyhow::Result<()> {
    let rest = left.checked_sub(bytes);
    *left = rest.ok_or(Fatal("the archive has too many directories for one run; import it in parts"))?;
    Ok(())
}

/// An error that ends the import.
#[derive(Debug)]
struct Fatal(&'static str);

impl std::fmt::Display for Fatal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Fatal {}

/// Whether an error affects more than one member: an error of the archive or the device, lack of space, damage, or a
/// filesystem that is read-only.
fn is_fatal(error: &anyhow::Error) -> bool {
    let is_of_all = |errno: i32| {
        [Errno::NOSPC, Errno::DQUOT, Errno::ROFS, Errno::IO, Errno::UCLEAN]
            .iter()
            .any(|all| all.raw_os_error() == errno)
    };
    error.downcast_ref::<Error>().is_some_and(|error| is_of_all(error.errno()))
        || error.chain().any(|cause| cause.is::<Fatal>() || cause.is::<std::io::Error>())
}

/// Whether a path contains `..`, so that it may name a different file than it seems to.
fn has_parent_component(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').any(|name| name == b"..")
}

/// Names and values of extended attributes.
type MemberXattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// A directory to complete at the end.
struct PendingDir {
    id: InodeId,
    atime: Option<SetTime>,
    mtime: Option<SetTime>,
    /// Extended attributes that new files in the directory would inherit, such as its default ACL.
    xattrs: MemberXattrs,
}

/// A cache of directories: maps their paths below the target to their inodes. The cache is emptied when a link or
/// directory on a path may have been replaced, and when the cache is full.
#[derive(Default)]
struct DirCache {
    paths: HashMap<Vec<u8>, InodeId>,
    /// Total length of all paths in the cache.
    bytes: usize,
}

impl DirCache {
    fn remember(&mut self, names: &[&[u8]], dir: InodeId) {
        let path = names.join(&b'/');
        if self.paths.len() >= MAX_DIRS || self.bytes > MAX_DIRS_BYTES {
            self.clear();
        }
        self.bytes += path.len();
        self.paths.insert(path, dir);
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// A new inode for a member.
struct ImportedInode {
    id: InodeId,
    /// The temporary name of the inode, if a file with the member's name exists. The complete inode replaces this file
    /// and takes its name.
    temporary: Option<Vec<u8>>,
}

struct Import<'a> {
    fs: &'a Fs,
    job: &'a ImportContext<'a>,
    /// The target directory.
    base: InodeId,
    dirs: DirCache,
    /// Times and attributes of directories, to set at the end (I2).
    dirs_to_finish: Vec<PendingDir>,
    /// The names that the layer has added so far, if the archive is a layer.
    layer: Option<Layer>,
    /// The number of further bytes that may be kept until the end (I4).
    held_left: usize,
    counts: ImportReport,
    /// The number of bytes of file data that had been written when the last commit started.
    committed_bytes: u64,
}

impl<'a> Import<'a> {
    fn new(fs: &'a Fs, job: &'a ImportContext<'a>, target: &[u8]) -> anyhow::Result<Self> {
        let mut base = fs.root();
        let names = normal_names(target);
        for (index, name) in names.iter().enumerate() {
            let path = || format!("{}{}", job.options.place, printable(&join(&names[..=index])));
            base = match fs.lookup_path(&join(&names[..=index]), true) {
                Ok(attr) if attr.is_dir() => attr.id,
                Ok(_) => bail!("{} is not a directory; choose another target", path()),
                Err(Error::NotFound) => {
                    fs.create(base, name, NewInode::dir(0o755), &job.dir_caller()).with_context(path)?.id
                }
                Err(error) => return Err(error).with_context(path),
            };
        }
        Ok(Self {
            fs,
            job,
            base,
            dirs: DirCache::default(),
            dirs_to_finish: Vec::new(),
            layer: job.options.oci_layer.then(Layer::default),
            held_left: HELD_MAX,
            counts: ImportReport::default(),
            committed_bytes: 0,
        })
    }

    fn contents(&self) -> Contents<'a> {
        Contents { fs: self.fs, job: self.job }
    }

    fn run(&mut self, reader: &mut ArchiveReader, first: Option<ArchiveMember>) -> anyhow::Result<()> {
        let contents = self.contents();
        std::thread::scope(|scope| {
            let mut thread = reader.place_of_data().map(|_| ContentsThread::start(scope, contents)).transpose()?;
            let made = self.members(reader, first, thread.as_mut());
            // A member that failed in this thread comes later in the archive than all files that were sent to the
            // separate thread. So an error of the separate thread takes precedence (I3).
            self.counts.failed += thread.map_or(Ok(0), ContentsThread::finish)?;
            made
        })?;
        for dir in std::mem::take(&mut self.dirs_to_finish).into_iter().rev() {
            let times = SetAttr { atime: dir.atime, mtime: dir.mtime, ..SetAttr::default() };
            let finished = contents
                .xattrs(&dir.xattrs, dir.id)
                .and_then(|()| Ok(self.fs.setattr(dir.id, &times, &Caller::ROOT).map(drop)?));
            let is_gone = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Error::Stale | Error::NotFound));
            match finished {
                // A later member of the archive replaced the directory, so no times and attributes are set.
                Err(error) if is_gone(&error) => {}
                finished => finished.context("cannot set the times and attributes of a directory")?,
            }
        }
        Ok(())
    }

    fn members(
        &mut self,
        reader: &mut ArchiveReader,
        first: Option<ArchiveMember>,
        mut thread: Option<&mut ContentsThread<'_>>,
    ) -> anyhow::Result<()> {
        let mut next = first;
        while let Some(member) = next {
            let names = normal_names(&member.path);
            let is_wanted = names.len() >= self.job.options.strip_components.max(1) || member.kind == MemberKind::Dir;
            if is_wanted && !self.job.is_excluded(&names) {
                let names = names.get(self.job.options.strip_components..).unwrap_or_default();
                // The member `.` has no name and is the target directory itself. A directory whose names were all
                // stripped is skipped.
                if !names.is_empty() || (member.kind == MemberKind::Dir && self.job.options.strip_components == 0) {
                    (self.job.watch)(ArchiveMessage::Member(&member.path));
                    let unpacked = self
                        .member(reader, &member, names, thread.as_deref_mut())
                        .with_context(|| self.job.cannot_import(&member.path));
                    match unpacked {
                        Ok(()) => self.counts.entries += 1,
                        Err(error) => {
                            self.job.report_skipped(error)?;
                            self.counts.failed += 1;
                        }
                    }
                }
            }
            (self.job.watch)(ArchiveMessage::Bytes(reader.input().taken()));
            if self.counts.bytes - self.committed_bytes >= COMMIT_BYTES {
                self.committed_bytes = self.counts.bytes;
                self.fs.start_commit();
            }
            next = reader.next_member().with_context(|| self.job.archive.clone())?;
        }
        Ok(())
    }

    fn member(
        &mut self,
        reader: &mut ArchiveReader,
        member: &ArchiveMember,
        names: &[&[u8]],
        thread: Option<&mut ContentsThread<'_>>,
    ) -> anyhow::Result<()> {
        if has_parent_component(&member.path) {
            bail!("its path contains '..'");
        }
        let Some((name, dirs)) = names.split_last() else { return self.dir(member, self.base) };
        let parent = self.parent_dir(dirs)?;
        if let Some(layer) = &mut self.layer {
            if let Some(whiteout) = layer::whiteout_of(name)? {
                self.counts.whiteouts += 1;
                self.dirs.clear();
                return layer.apply(self.fs, parent, whiteout);
            }
            charge(&mut self.held_left, Layer::memory_bytes(name))?;
            layer.note(parent, name);
        }
        match member.kind {
            MemberKind::Dir => {
                let dir = self.make_dir(parent, name, member)?;
                self.dirs.remember(names, dir);
                self.dir(member, dir)
            }
            MemberKind::HardLink => self.hard_link(member, parent, name),
            MemberKind::Symlink => {
                self.counts.symlinks += 1;
                self.make(parent, name, member, NewInode::symlink(&member.link))
            }
            MemberKind::File => {
                self.counts.files += 1;
                self.counts.bytes = self.counts.bytes.saturating_add(member.data_bytes());
                self.counts.xattrs += member.xattrs.len() as u64;
                let made = self.create(parent, name, member, NewInode::file(member.mode))?;
                // A file that replaces another is completed in this thread, before the old file is removed.
                let thread = thread.filter(|_| made.temporary.is_none());
                let id = made.id;
                self.install(parent, name, made, |import| {
                    import.fs.open_inode(id)?;
                    import.contents().file(reader, member, id, thread)
                })
            }
            MemberKind::CharDevice | MemberKind::BlockDevice | MemberKind::Fifo => {
                let kind = match member.kind {
                    MemberKind::CharDevice => mode::CHAR,
                    MemberKind::BlockDevice => mode::BLOCK,
                    _ => mode::FIFO,
                };
                if member.major > 0xfff || member.minor > 0xf_ffff {
                    bail!("device {}:{} is out of range", member.major, member.minor);
                }
                let rdev = if kind == mode::FIFO { 0 } else { rdev_from_parts(member.major, member.minor) };
                *if kind == mode::FIFO { &mut self.counts.fifos } else { &mut self.counts.devices } += 1;
                let new = NewInode { mode: kind | member.mode, rdev, symlink_target: None, ..NewInode::default() };
                self.make(parent, name, member, new)
            }
        }
    }

    /// Makes an inode without data and sets its attributes.
    fn make(&mut self, parent: InodeId, name: &[u8], member: &ArchiveMember, new: NewInode<'_>) -> anyhow::Result<()> {
        let made = self.create(parent, name, member, new)?;
        let id = made.id;
        self.install(parent, name, made, |import| import.contents().attributes(member, id))?;
        self.counts.xattrs += member.xattrs.len() as u64;
        Ok(())
    }

    /// Makes an inode with this name, or with a temporary one if the name exists and may be replaced (I5).
    fn create(
        &mut self,
        parent: InodeId,
        name: &[u8],
        member: &ArchiveMember,
        new: NewInode<'_>,
    ) -> anyhow::Result<ImportedInode> {
        let (uid, gid) = self.contents().owner(member);
        let caller = Caller { uid, gid, umask: 0 };
        match self.fs.create(parent, name, new, &caller) {
            Ok(attr) => Ok(ImportedInode { id: attr.id, temporary: None }),
            Err(Error::Exists) => {
                self.check_replaceable(parent, name)?;
                let temporary = temporary_name();
                let id = self.fs.create(parent, &temporary, new, &caller)?.id;
                Ok(ImportedInode { id, temporary: Some(temporary) })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Fails if the existing file must not be replaced. As in tar, an empty directory may be replaced. A layer may also
    /// replace a directory if everything in it comes from the layers below.
    fn check_replaceable(&self, parent: InodeId, name: &[u8]) -> anyhow::Result<()> {
        let old = self.fs.lookup(parent, name)?;
        match &self.layer {
            _ if !old.is_dir() => Ok(()),
            Some(layer) => layer.check_replaceable(self.fs, old.id),
            // A directory's size is twice the total length of its names, so it is 0 if the directory is empty.
            None if old.size == 0 => Ok(()),
            None => bail!("a directory of that name exists and is not empty; remove it first"),
        }
    }

    /// Completes a new inode. A complete inode with a temporary name replaces the file that has the member's name (I5).
    fn install(
        &mut self,
        parent: InodeId,
        name: &[u8],
        made: ImportedInode,
        complete: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(temporary) = made.temporary else { return complete(self) };
        let done = complete(self).and_then(|()| self.replace(parent, name, &temporary));
        if done.is_err() {
            // Errors of the removal are ignored, because the earlier error is reported.
            let removed = self.fs.unlink(parent, &temporary);
            let _ = removed.or_else(|_| self.fs.rmdir(parent, &temporary));
        }
        done
    }

    /// Replaces a name. If the old file is a link or a directory, cached directories are forgotten, because their paths
    /// may lead through the old file.
    fn replace(&mut self, parent: InodeId, name: &[u8], temporary: &[u8]) -> anyhow::Result<()> {
        let old = self.fs.lookup(parent, name)?;
        let is_dir = self.fs.lookup(parent, temporary)?.is_dir();
        if matches!(old.mode & mode::TYPE, mode::DIRECTORY | mode::SYMLINK) {
            self.dirs.clear();
        }
        if let Some(layer) = self.layer.as_ref().filter(|_| old.is_dir()) {
            layer.remove_dir(self.fs, parent, name)?;
        } else if old.is_dir() {
            self.fs.rmdir(parent, name)?;
        } else if is_dir {
            self.fs.unlink(parent, name)?;
        }
        Ok(self.fs.rename(parent, temporary, parent, name, RenameFlags::empty())?)
    }

    fn make_dir(&mut self, parent: InodeId, name: &[u8], member: &ArchiveMember) -> anyhow::Result<InodeId> {
        match self.fs.lookup(parent, name) {
            Ok(attr) if attr.is_dir() => Ok(attr.id),
            Ok(_) | Err(Error::NotFound) => {
                let made = self.create(parent, name, member, NewInode::dir(member.mode))?;
                let id = made.id;
                self.install(parent, name, made, |_| Ok(()))?;
                Ok(id)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Sets attributes of a directory, except for times and inheritable attributes, which are set at the end.
    fn dir(&mut self, member: &ArchiveMember, id: InodeId) -> anyhow::Result<()> {
        self.counts.directories += 1;
        let all = self.contents().set_attr(member);
        let is_inherited = |name: &[u8]| name == acl::DEFAULT || name.starts_with(b"btrfs.");
        let (mut xattrs, now): (MemberXattrs, MemberXattrs) =
            member.xattrs.iter().cloned().partition(|(name, _)| is_inherited(name));
        self.counts.xattrs += member.xattrs.len() as u64;
        if let Ok(acl) = self.fs.getxattr(id, acl::DEFAULT) {
            // The archive's files must not inherit a default ACL that the directory already had.
            self.fs.removexattr(id, acl::DEFAULT, &Caller::ROOT)?;
            if !xattrs.iter().any(|(name, _)| name == acl::DEFAULT) {
                xattrs.push((acl::DEFAULT.to_vec(), acl));
            }
        }
        let bytes: usize = xattrs.iter().map(|(name, value)| name.len() + value.len() + 64).sum();
        charge(&mut self.held_left, size_of::<PendingDir>() + bytes)?;
        self.dirs_to_finish.push(PendingDir { id, atime: all.atime, mtime: all.mtime, xattrs });
        self.fs.setattr(id, &SetAttr { atime: None, mtime: None, ..all }, &Caller::ROOT)?;
        self.contents().xattrs(&now, id)
    }

    fn hard_link(&mut self, member: &ArchiveMember, parent: InodeId, name: &[u8]) -> anyhow::Result<()> {
        let target = printable(&member.link);
        if has_parent_component(&member.link) {
            bail!("the path of its target '{target}' contains '..'");
        }
        let names = normal_names(&member.link);
        let names = names.get(self.job.options.strip_components..).unwrap_or_default();
        let Some((old_name, dirs)) = names.split_last() else { bail!("its target '{target}' is not in the archive") };
        let old = self
            .parent_dir(dirs)
            .and_then(|dir| Ok(self.fs.lookup(dir, old_name)?))
            .with_context(|| format!("its target '{target}'"))?;
        if old.is_dir() {
            bail!("its target '{target}' is a directory");
        }
        match self.fs.lookup(parent, name) {
            Ok(there) if there.id == old.id => {}
            Ok(there) => {
                if there.is_dir() && self.directories_to(dirs)?.contains(&there.id) {
                    bail!("its target '{target}' is in the directory that it would replace");
                }
                self.check_replaceable(parent, name)?;
                let temporary = temporary_name();
                self.fs.link(old.id, parent, &temporary)?;
                self.install(parent, name, ImportedInode { id: old.id, temporary: Some(temporary) }, |_| Ok(()))?;
            }
            Err(Error::NotFound) => {
                self.fs.link(old.id, parent, name)?;
            }
            Err(error) => return Err(error.into()),
        }
        self.counts.hard_links += 1;
        Ok(())
    }

    /// Returns the directory whose path below the target consists of `names`. Makes missing directories.
    fn parent_dir(&mut self, names: &[&[u8]]) -> anyhow::Result<InodeId> {
        if names.is_empty() {
            return Ok(self.base);
        }
        if let Some(dir) = self.dirs.paths.get(&names.join(&b'/')) {
            return Ok(*dir);
        }
        let dir = *self.directories_to(names)?.last().expect("the target is never taken off");
        self.dirs.remember(names, dir);
        Ok(dir)
    }

    /// Returns all directories on the path that consists of `names`, from the target directory to the last name. Makes
    /// missing directories.
    fn directories_to(&self, names: &[&[u8]]) -> anyhow::Result<Vec<InodeId>> {
        // `way` keeps all directories on the path, because `..` in the target of a symbolic link leads back to the
        // previous directory of the path.
        let mut way = vec![self.base];
        let mut todo: Vec<Vec<u8>> = names.iter().rev().map(|name| name.to_vec()).collect();
        let mut nr_links = 0;
        while let Some(name) = todo.pop() {
            let here = *way.last().expect("the target is never taken off");
            if name == b".." {
                if way.len() > 1 {
                    way.pop();
                }
                continue;
            }
            match self.fs.lookup(here, &name) {
                Ok(attr) if attr.is_dir() => way.push(attr.id),
                Ok(attr) if attr.mode & mode::TYPE == mode::SYMLINK => {
                    nr_links += 1;
                    if nr_links > MAX_LINKS {
                        return Err(Error::SymlinkLoop.into());
                    }
                    let target = self.fs.readlink(attr.id)?;
                    if target.starts_with(b"/") {
                        way.truncate(1);
                    }
                    let names = target.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
                    todo.extend(names.rev().map(<[u8]>::to_vec));
                }
                Ok(_) => bail!("'{}' is not a directory", printable(&name)),
                Err(Error::NotFound) => {
                    way.push(self.fs.create(here, &name, NewInode::dir(0o755), &self.job.dir_caller())?.id);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(way)
    }
}

/// Bytes of data after which a background commit starts, so that trees are built while data is written and not all at
/// the end.
const COMMIT_BYTES: u64 = 256 << 20;
/// Limit for symbolic links on one path, as on Linux.
const MAX_LINKS: usize = 40;
/// The largest number of directories in [`DirCache`].
const MAX_DIRS: usize = 1 << 16;
/// The largest total length of the paths in [`DirCache`], in bytes.
const MAX_DIRS_BYTES: usize = 8 << 20;
/// The maximum memory in bytes for data kept until the end (I4), enough for about three million directories.
const HELD_MAX: usize = 256 << 20;
