//! [`CurrentSubvolume`]: the subvolume that is being received, and the commands that change it.
//!
//! New inodes inherit nothing from their directory: the stream has the attributes of each new inode. Until the `chmod`
//! command of a new inode, only the owner can access the inode, as with btrfs-progs.

use ubtrfs_format::RootId;
use ubtrfs_format::item::{Compression as DiskCompression, InodeFlags};
use ubtrfs_stream::{EncodedCompression, FrameHeader, Position, StreamCommand};

use super::error::{ReceiveError, ReceiveProblem};
use super::incomplete::{INCOMPLETE_XATTR, ReceiveProgress, SentSubvolume};
use super::joined::{JoinedCommands, attributes_of};
use super::session::{ReceiveSession, ReceivedSubvolume};
use super::sharing::{At, Sharing, Unshared};
use super::verify::StreamVerifier;
use super::walk::{PathWalk, entry};
use crate::file::encoded::Encoded;
use crate::inode::xattr::CAPABILITY;
use crate::types::{Caller, FallocateMode, InodeId, NewInode, RenameFlags, SetAttr, XattrFlags, mode};
use crate::{Error, Fs};

type Result<T, E = ReceiveProblem> = std::result::Result<T, E>;

/// The subvolume that is being received.
pub(crate) struct CurrentSubvolume<'s> {
    pub(crate) made: ReceivedSubvolume,
    pub(crate) name: Vec<u8>,
    pub(crate) sent: SentSubvolume,
    /// Commands of the stream so far, including those that an earlier receive applied.
    pub(crate) progress: ReceiveProgress,
    /// The commands that an earlier receive had applied when it stopped.
    resumed: ReceiveProgress,
    /// Whether a command failed and was skipped.
    pub(crate) has_failures: bool,
    walk: PathWalk,
    /// Looks up files of the clone source that was used last.
    source_walk: Option<PathWalk>,
    /// The capability that the last `set_xattr` set, and its path. A later `chown` removes the capability from the
    /// file, so the capability is set again: Linux before 5.8 sends `chown` after `set_xattr`.
    capability: Option<(Vec<u8>, Vec<u8>)>,
    /// Records the expected state for `receive --verify`; `None` without that option.
    pub(crate) verifier: Option<StreamVerifier>,
    /// The sent subvolume, if its data is to be shared and it is on this filesystem.
    pub(crate) sharing: Option<Sharing<'s>>,
}

impl<'s> CurrentSubvolume<'s> {
    pub(crate) fn new(
        made: ReceivedSubvolume,
        name: Vec<u8>,
        sent: SentSubvolume,
        resumed: ReceiveProgress,
        (verifies, sharing): (bool, Option<Sharing<'s>>),
        store_bytes: u64,
    ) -> Self {
        let walk = PathWalk::new(made.id, store_bytes);
        Self {
            made,
            name,
            sent,
            progress: ReceiveProgress::default(),
            resumed,
            has_failures: false,
            walk,
            source_walk: None,
            capability: None,
            verifier: verifies.then(|| StreamVerifier::new(store_bytes)),
            sharing,
        }
    }

    /// Skips a command that an earlier receive applied. Returns false, without a change, for any other command.
    pub(crate) fn skips(&mut self, header: &FrameHeader, command: &StreamCommand<'_>) -> Result<bool> {
        if self.progress.nr_commands >= self.resumed.nr_commands {
            return Ok(false);
        }
        self.progress.add(header);
        self.note_capability(command);
        if self.progress.nr_commands == self.resumed.nr_commands {
            self.check_resumed()?;
        }
        Ok(true)
    }

    /// Fails if an earlier receive began with another stream.
    pub(crate) fn check_resumed(&self) -> Result<()> {
        let is_before = self.progress.nr_commands < self.resumed.nr_commands;
        let is_other =
            self.progress.nr_commands == self.resumed.nr_commands && self.progress.digest != self.resumed.digest;
        if is_before || is_other {
            let hint =
                "this stream has other commands than the one that began it; delete it first: ubtrfs subvolume delete";
            return Err(ReceiveProblem::Incomplete { name: self.name.clone(), hint });
        }
        Ok(())
    }

    /// The number and checksum of the commands that are applied to the subvolume.
    pub(crate) fn reached(&self) -> ReceiveProgress {
        // While commands are skipped, the subvolume has all that the earlier receive applied, which is more than this
        // receive has read so far.
        if self.progress.nr_commands <= self.resumed.nr_commands { self.resumed } else { self.progress }
    }

    fn root(&self) -> RootId {
        self.made.id
    }

    /// Applies a command that neither begins nor ends a subvolume.
    pub(crate) fn apply(&mut self, session: &mut ReceiveSession<'_>, command: &StreamCommand<'_>) -> Result<()> {
        let fs = session.fs;
        let Some(mut verifier) = self.verifier.take() else {
            self.change(session, command)?;
            self.note_capability(command);
            return Ok(());
        };
        let is_removal = matches!(command, StreamCommand::Unlink { .. } | StreamCommand::Rmdir { .. });
        let removed = match command.path() {
            Some(path) if is_removal => Some(self.walk.inode(fs, path)),
            _ => None,
        };
        let replaced = match command {
            StreamCommand::Rename { to, .. } => self.walk.inode(fs, to).ok(),
            _ => None,
        };
        let changed = self.change(session, command).and_then(|()| {
            self.note_capability(command);
            if let Some(id) = replaced {
                verifier.replaced(id.ino);
            }
            let id = match (removed, command) {
                (Some(id), _) => id?,
                (None, StreamCommand::Rename { to, .. }) => self.walk.inode(fs, to)?,
                (None, _) => self.walk.inode(fs, command.path().unwrap_or_default())?,
            };
            verifier.note(id.ino, command);
            for path in changed_names(command).into_iter().flatten() {
                verifier.names_changed(self.walk.place(fs, path)?.0.ino);
            }
            Ok(())
        });
        self.verifier = Some(verifier);
        changed
    }

    /// Shares the data that waits to be shared. After an error, the writes of this data do not count as applied.
    pub(crate) fn share_waiting(&mut self, fs: &Fs) -> Result<(), ReceiveError> {
        let Some(sharing) = &mut self.sharing else { return Ok(()) };
        sharing.flush(fs).map_err(|Unshared { before, error }| {
            self.progress = before;
            error
        })
    }

    /// Prepares to apply a command: shares the data that waits, unless the command continues it.
    pub(crate) fn share_before(
        &mut self,
        fs: &Fs,
        at: Position,
        command: &StreamCommand<'_>,
    ) -> Result<(), ReceiveError> {
        let continues = match (&self.sharing, command) {
            (
                Some(sharing),
                StreamCommand::Write { path, offset, .. } | StreamCommand::EncodedWrite { path, offset, .. },
            ) => sharing.continues(fs, path, *offset),
            _ => false,
        };
        let shared = if continues { Ok(()) } else { self.share_waiting(fs) };
        if let Some(sharing) = &mut self.sharing {
            sharing.at = At { position: at, before: self.progress };
        }
        shared
    }

    /// Updates `capability` after a command that was applied, now or by an earlier receive.
    fn note_capability(&mut self, command: &StreamCommand<'_>) {
        let is_of = |noted: &Option<(Vec<u8>, Vec<u8>)>, path: &[u8]| noted.as_ref().is_some_and(|(of, _)| of == path);
        match *command {
            StreamCommand::SetXattr { path, name, data } if name == CAPABILITY => {
                self.capability = Some((path.to_vec(), data.to_vec()));
            }
            StreamCommand::RemoveXattr { path, name } if name == CAPABILITY && is_of(&self.capability, path) => {
                self.capability = None;
            }
            StreamCommand::Chown { .. } => self.capability = None,
            StreamCommand::Rename { path, to } if is_of(&self.capability, path) => {
                self.capability = self.capability.take().map(|(_, value)| (to.to_vec(), value));
            }
            _ => {}
        }
    }

    fn change(&mut self, session: &mut ReceiveSession<'_>, command: &StreamCommand<'_>) -> Result<()> {
        let fs = session.fs;
        match *command {
            StreamCommand::Subvol { .. } | StreamCommand::Snapshot { .. } | StreamCommand::End => {
                Err(ReceiveProblem::Order("a subvolume inside of another"))
            }
            StreamCommand::Mkfile { path, .. }
            | StreamCommand::Mkdir { path, .. }
            | StreamCommand::Mknod { path, .. }
            | StreamCommand::Mkfifo { path, .. }
            | StreamCommand::Mksock { path, .. }
            | StreamCommand::Symlink { path, .. } => match new_inode(command) {
                Some(new) => self.create(fs, path, new?),
                None => Ok(()),
            },
            StreamCommand::Rename { path, to } => self.rename(fs, path, to),
            StreamCommand::Link { path, target } => {
                let id = self.walk.inode(fs, target)?;
                let (dir, name) = self.walk.place(fs, path)?;
                let linked = fs.link(id, dir, name)?;
                uncount(fs, linked.id);
                Ok(())
            }
            StreamCommand::Unlink { path } => {
                let (dir, name) = self.walk.place(fs, path)?;
                self.walk.gone(dir, path);
                Ok(fs.unlink(dir, name)?)
            }
            StreamCommand::Rmdir { path } => {
                let (dir, name) = self.walk.place(fs, path)?;
                self.walk.gone(dir, path);
                // `rmdir` would also remove an empty subvolume. `entry` fails if the name leads to a subvolume.
                entry(fs, dir, name)?;
                Ok(fs.rmdir(dir, name)?)
            }
            StreamCommand::SetXattr { path, name, data } => self.set_xattr(fs, path, name, data),
            StreamCommand::RemoveXattr { path, name } => {
                let id = self.walk.inode(fs, path)?;
                if self.is_mark(id, name) {
                    return Ok(());
                }
                Ok(fs.removexattr(id, name, &Caller::ROOT)?)
            }
            StreamCommand::Write { path, offset, data } => self.write(fs, path, offset, data),
            StreamCommand::Clone { offset, len, path, clone_uuid, clone_ctransid, clone_path, clone_offset } => {
                let source = match clone_uuid == self.sent.uuid {
                    true => self.walk.inode(fs, clone_path)?,
                    false => {
                        let root = session.source(clone_uuid, clone_ctransid)?;
                        self.in_source(fs, root, clone_path)?
                    }
                };
                let id = self.walk.inode(fs, path)?;
                // `clone_range` takes a length of 0 as "up to the end of the file".
                if len == 0 { Ok(()) } else { Ok(fs.clone_range(source, clone_offset, id, offset, len)?) }
            }
            StreamCommand::Truncate { path, size } => {
                self.set(fs, path, SetAttr { size: Some(size), ..SetAttr::default() }).map(drop)
            }
            StreamCommand::Chmod { path, .. } | StreamCommand::Utimes { path, .. } => {
                self.set(fs, path, attributes_of(command)?).map(drop)
            }
            StreamCommand::Chown { path, .. } => self.chown(fs, path, attributes_of(command)?),
            // The range was sent without data, so there is nothing to write.
            StreamCommand::UpdateExtent { path, .. } => self.walk.inode(fs, path).map(drop),
            StreamCommand::Fallocate { path, mode, offset, size } => {
                let id = self.walk.inode(fs, path)?;
                let mode = FallocateMode::from_bits(mode).ok_or(Error::NotSupported("this mode of fallocate"))?;
                Ok(fs.fallocate(id, offset, size, mode)?)
            }
            StreamCommand::Fileattr { path, attr } => self.fileattr(fs, path, attr),
            StreamCommand::EncodedWrite { .. } => self.write_encoded(session, command),
            // The file arrives whole, but later changes of it will not be detected. The report says so.
            StreamCommand::EnableVerity { path, .. } => {
                self.walk.inode(fs, path)?;
                session.report.nr_without_verity = session.report.nr_without_verity.saturating_add(1);
                Ok(())
            }
        }
    }

    /// Whether commands may be joined: not while single commands are skipped or recorded, and not if a capability is
    /// to be set again.
    pub(crate) fn may_join(&self) -> bool {
        self.progress.nr_commands >= self.resumed.nr_commands && self.verifier.is_none() && self.capability.is_none()
    }

    /// Applies joined commands. Returns false, without a change, if they have to be applied one by one.
    pub(crate) fn apply_joined(&mut self, fs: &Fs, joined: &JoinedCommands<'_>) -> bool {
        let done = match *joined {
            JoinedCommands::Create { temporary, to, new } => match self.is_free(fs, temporary) {
                true => self.create(fs, to, new),
                false => return false,
            },
            JoinedCommands::SetAttr { path, set } => self.set(fs, path, set).map(drop),
        };
        done.is_ok()
    }

    fn is_free(&mut self, fs: &Fs, path: &[u8]) -> bool {
        let Ok((dir, name)) = self.walk.place(fs, path) else { return false };
        matches!(entry(fs, dir, name), Err(ReceiveProblem::Fs(Error::NotFound)))
    }

    fn create(&mut self, fs: &Fs, path: &[u8], new: NewInode<'_>) -> Result<()> {
        let (dir, name) = self.walk.place(fs, path)?;
        let made = fs.create(dir, name, new, &Caller::ROOT)?;
        self.walk.made(dir, path, made.id, made.is_dir());
        uncount(fs, made.id);
        Ok(())
    }

    fn rename(&mut self, fs: &Fs, path: &[u8], to: &[u8]) -> Result<()> {
        let (dir, name) = self.walk.place(fs, path)?;
        // `rename` would also move a subvolume. `entry` fails if the name leads to a subvolume.
        entry(fs, dir, name)?;
        let (new_dir, new_name) = self.walk.place(fs, to)?;
        fs.rename(dir, name, new_dir, new_name, RenameFlags::empty())?;
        self.walk.renamed((dir, path), (new_dir, to));
        Ok(())
    }

    fn set(&mut self, fs: &Fs, path: &[u8], set: SetAttr) -> Result<InodeId> {
        let id = self.walk.inode(fs, path)?;
        fs.setattr(id, &set, &Caller::ROOT)?;
        Ok(id)
    }

    fn is_mark(&self, id: InodeId, name: &[u8]) -> bool {
        id == InodeId::root_of(self.root()) && name == INCOMPLETE_XATTR.as_bytes()
    }

    fn set_xattr(&mut self, fs: &Fs, path: &[u8], name: &[u8], data: &[u8]) -> Result<()> {
        let id = self.walk.inode(fs, path)?;
        if self.is_mark(id, name) {
            return Ok(());
        }
        Ok(fs.setxattr(id, name, data, XattrFlags::empty(), &Caller::ROOT)?)
    }

    fn chown(&mut self, fs: &Fs, path: &[u8], set: SetAttr) -> Result<()> {
        let id = self.set(fs, path, set)?;
        if let Some((of, value)) = &self.capability
            && of == path
        {
            fs.setxattr(id, CAPABILITY, value, XattrFlags::empty(), &Caller::ROOT)?;
        }
        Ok(())
    }

    /// Sets the flags in [`RECEIVED_FLAGS`], which do not hinder later commands, and ignores all other flags in the
    /// stream. Extended attributes and the mount options decide compression and copy-on-write. (btrfs-progs ignores all
    /// flags.)
    fn fileattr(&mut self, fs: &Fs, path: &[u8], attr: u64) -> Result<()> {
        let id = self.walk.inode(fs, path)?;
        Ok(fs.set_flags_of(id, RECEIVED_FLAGS, InodeFlags::from_bits_retain(attr))?)
    }

    fn write(&mut self, fs: &Fs, path: &[u8], mut offset: u64, mut data: &[u8]) -> Result<()> {
        let id = self.walk.inode(fs, path)?;
        offset.checked_add(data.len() as u64).ok_or(Error::FileTooBig)?;
        if let Some(sharing) = &mut self.sharing {
            let taken = sharing.take(fs, path, id, offset, data)?;
            (offset, data) = (offset.saturating_add(taken as u64), data.get(taken..).unwrap_or_default());
        }
        Ok(fs.write_all(id, offset, data)?)
    }

    fn write_encoded(&mut self, session: &mut ReceiveSession<'_>, command: &StreamCommand<'_>) -> Result<()> {
        let StreamCommand::EncodedWrite {
            path,
            offset,
            unencoded_file_len: len,
            unencoded_len: ram_bytes,
            unencoded_offset: skip,
            compression,
            encryption,
            data: bytes,
        } = *command
        else {
            return Ok(());
        };
        if encryption.unwrap_or(0) != 0 {
            return Err(ReceiveProblem::NotSupported("encrypted data is not supported".to_owned()));
        }
        let number = compression.unwrap_or(0);
        let unknown = || ReceiveProblem::NotSupported(format!("compression number {number} is not known"));
        let (kind, sectorsize) = match EncodedCompression::from_number(number).ok_or_else(unknown)? {
            EncodedCompression::None => (DiskCompression::None, 0),
            EncodedCompression::Zlib => (DiskCompression::Zlib, 0),
            EncodedCompression::Zstd => (DiskCompression::Zstd, 0),
            EncodedCompression::Lzo { sectorsize } => (DiskCompression::Lzo, sectorsize),
        };
        let id = self.walk.inode(session.fs, path)?;
        let encoded = Encoded { kind, sectorsize, bytes, ram_bytes, skip, len };
        let plain = encoded.decompress()?;
        if let Some(sharing) = &mut self.sharing {
            let data = encoded.range(&plain);
            let taken = sharing.take(session.fs, path, id, offset, data)?;
            if taken > 0 {
                let rest = data.get(taken..).unwrap_or_default();
                return Ok(session.fs.write_all(id, offset.saturating_add(taken as u64), rest)?);
            }
        }
        let is_stored = session.fs.write_encoded(id, offset, &encoded, &plain, session.options.force_decompress)?;
        session.report.nr_stored_encoded = session.report.nr_stored_encoded.saturating_add(u64::from(is_stored));
        Ok(())
    }

    /// The inode at a path in a clone source.
    fn in_source(&mut self, fs: &Fs, root: RootId, path: &[u8]) -> Result<InodeId> {
        if self.source_walk.as_ref().is_none_or(|walk| walk.root() != root) {
            self.source_walk = Some(PathWalk::new(root, super::store_bytes(fs)));
        }
        match &mut self.source_walk {
            Some(walk) => walk.inode(fs, path),
            None => Err(Error::NotFound.into()),
        }
    }
}

/// The inode that a command creates; `None` for a command that creates no inode. Until the `chmod` of the inode, only
/// its owner can access it.
pub(crate) fn new_inode<'c>(command: &StreamCommand<'c>) -> Option<Result<NewInode<'c>>> {
    let new = match *command {
        StreamCommand::Mkfile { .. } => NewInode::file(0o600),
        StreamCommand::Mkdir { .. } => NewInode::dir(0o700),
        StreamCommand::Mknod { rdev, mode, .. } => match device_node(rdev, mode) {
            Ok(new) => new,
            Err(error) => return Some(Err(error.into())),
        },
        StreamCommand::Mkfifo { .. } => NewInode { mode: mode::FIFO | 0o600, ..NewInode::default() },
        StreamCommand::Mksock { .. } => NewInode { mode: mode::SOCKET | 0o600, ..NewInode::default() },
        StreamCommand::Symlink { target, .. } => NewInode::symlink(target),
        _ => return None,
    };
    Some(Ok(NewInode { inherits_nothing: true, ..new }))
}

fn device_node<'n>(rdev: u64, of_node: u64) -> Result<NewInode<'n>, Error> {
    let kind = of_node as u32 & mode::TYPE;
    if of_node > u64::from(u32::MAX) || !matches!(kind, mode::CHAR | mode::BLOCK) {
        return Err(Error::InvalidArgument("the mode is not that of a device node"));
    }
    let rdev = u32::try_from(rdev).map_err(|_| Error::InvalidArgument("no such device number"))?;
    Ok(NewInode { mode: kind | 0o600, rdev, ..NewInode::default() })
}

/// The paths that a command adds or removes.
fn changed_names<'c>(command: &StreamCommand<'c>) -> [Option<&'c [u8]>; 2] {
    match *command {
        StreamCommand::Rename { path, to } => [Some(path), Some(to)],
        StreamCommand::Mkfile { path, .. }
        | StreamCommand::Mkdir { path, .. }
        | StreamCommand::Mknod { path, .. }
        | StreamCommand::Mkfifo { path, .. }
        | StreamCommand::Mksock { path, .. }
        | StreamCommand::Symlink { path, .. }
        | StreamCommand::Link { path, .. }
        | StreamCommand::Unlink { path }
        | StreamCommand::Rmdir { path } => [Some(path), None],
        _ => [None, None],
    }
}

/// Releases the reference that `create` counts for the kernel, because the kernel never sees this inode.
fn uncount(fs: &Fs, id: InodeId) {
    if fs.options.track_lookups {
        fs.forget(id, 1);
    }
}

/// Flags that a stream may set.
const RECEIVED_FLAGS: InodeFlags =
    InodeFlags::SYNC.union(InodeFlags::NODUMP).union(InodeFlags::NOATIME).union(InodeFlags::DIRSYNC);
