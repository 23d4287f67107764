//! [`Sender`]: writes the commands of one subvolume.
//!
//! ```text
//! incremental:  names: removals, moves, directories that moves need  ([`super::moves`])
//! both:         inodes in the order of their numbers: creation, names, attributes, data, owner, mode, times, flags
//! at the end:   times of directories, attributes of directories that new files would inherit
//! ```
//!
//! - S1. All names that would be in the way are removed before the inodes are walked, so no creation, link or rename
//!   needs a name that is in use.
//! - S2. A directory exists before anything is made in it: the directories above a new inode are made first, regardless
//!   of their inode numbers.
//! - S3. The owner is sent before the mode, because a change of the owner clears set-id bits. Capabilities are sent
//!   after owner and data, because changing the owner or the data clears them. Times follow, and then flags. Times of a
//!   directory change with each name in it, so they are sent when no name in it has changed for a while, or at the end.
//! - S4. New files inherit the default ACL and the compression of their directory. So a directory has no default ACL
//!   and no compression while names are created in it: both are first removed from a directory that the receiver has,
//!   and are sent for all directories at the end.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ubtrfs_format::item::{DirItem, FileType, InodeFlags, InodeItem};
use ubtrfs_format::{Ino, Key, KeyType};
use ubtrfs_stream::{StreamCommand, StreamVersion};
use ubtrfs_tree::{Diff, ItemChange, NodeSource};

use super::clones::Clones;
use super::extents::{DataOptions, FileDiff};
use super::moves::{MoveResult, MoveStep, Moves, NameChange};
use super::pipeline::Pipeline;
use super::tree::{InodeLink, SentTree, is_dir, is_regular, is_same};
use crate::Fs;
use crate::error::Result;
use crate::inode::xattr::CAPABILITY;
use crate::items::file_extent::{ExtentAt, decode_of, link_target};
use crate::types::{mode, rdev_of_item};

/// Writes one subvolume into a pipeline.
pub(super) struct Sender<'s, 'p, 'q, 'e> {
    fs: &'s Fs,
    old: Option<&'s SentTree>,
    new: &'s SentTree,
    pipeline: &'p mut Pipeline<'q, 'e>,
    clones: Clones<'s>,
    options: DataOptions,
    moved: MoveResult,
    times: DirTimes,
    /// Directories of the new tree whose default ACL and compression are sent at the end (S4).
    inherited: Vec<u64>,
    /// Directories for which `bare` was called (S4).
    bared: HashSet<u64>,
    /// Directories that exist at the receiver, as [`Self::make_above`] found out. They are remembered so that they are
    /// not looked up again.
    there: HashSet<u64>,
}

/// An inode whose items are being walked.
struct SentInode {
    ino: u64,
    item: InodeItem,
    /// The inode in the old tree, if both trees have this inode.
    old: Option<InodeItem>,
    links: Vec<InodeLink>,
    links_changed: bool,
    /// Set when the first item after the names is reached.
    begun: Option<BegunInode>,
}

struct BegunInode {
    path: Arc<[u8]>,
    file: Option<FileDiff>,
    /// Whether a command that changes the inode's times was sent.
    is_changed: bool,
    /// Whether the `security.capability` attribute changed; it is sent late (S3).
    has_new_capability: bool,
    has_inherited: bool,
}

impl<'s, 'p, 'q, 'e> Sender<'s, 'p, 'q, 'e> {
    pub(super) fn new(
        fs: &'s Fs,
        (old, new): (Option<&'s SentTree>, &'s SentTree),
        clones: Clones<'s>,
        options: DataOptions,
        pipeline: &'p mut Pipeline<'q, 'e>,
    ) -> Self {
        Self {
            fs,
            old,
            new,
            pipeline,
            clones,
            options,
            moved: MoveResult::default(),
            times: DirTimes::default(),
            inherited: Vec::new(),
            bared: HashSet::new(),
            there: HashSet::new(),
        }
    }

    /// Writes all commands of the subvolume except the first and the last.
    pub(super) fn send(mut self, source: &dyn NodeSource) -> Result<()> {
        if let Some(old) = self.old {
            self.send_names(old)?;
        }
        self.send_inodes(source)?;
        while let Some(dir) = self.times.pop() {
            self.send_dir_times(dir)?;
        }
        self.send_inherited()
    }

    /// Removes and moves names.
    fn send_names(&mut self, old: &'s SentTree) -> Result<()> {
        let new = self.new;
        let mut moves = Moves::new(old, new);
        let mut touched: HashSet<u64> = HashSet::new();
        let mut diff = Diff::new(new.source(), Some(old.root()), new.root());
        while let Some(change) = diff.next()? {
            let ino = change.key.objectid;
            let mut out = |step: MoveStep| self.send_step(step, &mut touched);
            match change.key.item_type {
                KeyType::INODE_ITEM => {
                    let before = change.old.map(|item| old.decode_inode(&item)).transpose()?.filter(has_name);
                    let after = change.new.map(|item| new.decode_inode(&item)).transpose()?.filter(has_name);
                    let is_kept =
                        matches!((&before, &after), (Some(before), Some(after)) if is_same(ino, before, after));
                    if let Some(before) = before.filter(|_| !is_kept) {
                        moves.deleted(ino, is_dir(&before), &mut out)?;
                    }
                    if !is_kept {
                        skip_inode(&mut diff, ino)?;
                    }
                }
                KeyType::INODE_REF | KeyType::INODE_EXTREF if moves.is_kept(ino)? => moves.renamed(ino, &mut out)?,
                _ => skip_inode(&mut diff, ino)?,
            }
        }
        self.moved = moves.run(&mut |step| self.send_step(step, &mut touched))?;
        for dir in touched {
            self.touch(dir)?;
        }
        Ok(())
    }

    fn send_step(&mut self, step: MoveStep, touched: &mut HashSet<u64>) -> Result<()> {
        if let (NameChange::Mkdir(path, _), Some(parent)) = (&step.change, step.touched.first()) {
            let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            self.bare(*parent, &path[..end], false)?;
        }
        let command = match &step.change {
            NameChange::Unlink(path) => StreamCommand::Unlink { path },
            NameChange::Rmdir(path) => StreamCommand::Rmdir { path },
            NameChange::Rename(path, to) => StreamCommand::Rename { path, to },
            NameChange::Mkdir(path, ino) => StreamCommand::Mkdir { path, ino: *ino },
        };
        self.pipeline.command(&command)?;
        for dir in step.touched {
            if !touched.contains(&dir) && self.is_kept(dir)? {
                touched.insert(dir);
            }
        }
        Ok(())
    }

    fn is_kept(&self, ino: u64) -> Result<bool> {
        let Some(old) = self.old else { return Ok(false) };
        Ok(match (old.inode(ino)?, self.new.inode(ino)?) {
            (Some(before), Some(after)) => is_same(ino, &before, &after),
            _ => false,
        })
    }

    fn send_inodes(&mut self, source: &dyn NodeSource) -> Result<()> {
        let mut diff = Diff::new(source, self.old.map(SentTree::root), self.new.root());
        let mut current: Option<SentInode> = None;
        while let Some(change) = diff.next()? {
            let ino = change.key.objectid;
            if current.as_ref().is_none_or(|current| current.ino != ino) {
                if let Some(done) = current.take() {
                    self.finish(done)?;
                }
                current = self.enter(&change, &mut diff)?;
            }
            match &mut current {
                Some(current) => self.item(current, change, &mut diff)?,
                None => skip_inode(&mut diff, ino)?,
            }
        }
        current.map_or(Ok(()), |done| self.finish(done))
    }

    /// Begins an inode at its first difference; `None` if the inode is not sent.
    fn enter(&self, change: &ItemChange, diff: &mut Diff<'_>) -> Result<Option<SentInode>> {
        let ino = change.key.objectid;
        let item = match (&change.new, change.key.item_type) {
            (Some(item), KeyType::INODE_ITEM) => Some(self.new.decode_inode(item)?).filter(has_name),
            _ => self.new.inode(ino)?,
        };
        let Some(item) = item else { return Ok(None) };
        let before = self.old.map(|old| old.inode(ino)).transpose()?.flatten();
        let is_there = before.is_some();
        let old = before.filter(|before| is_same(ino, before, &item));
        // All items of a new inode are sent, even items that are equal to items of an old inode with the same number.
        // This also applies if the old inode has no name.
        if old.is_none() && (is_there || change.old.is_some()) {
            diff.report_all_of(ino);
        }
        Ok(Some(SentInode { ino, item, old, links: Vec::new(), links_changed: false, begun: None }))
    }

    fn item(&mut self, current: &mut SentInode, mut change: ItemChange, diff: &mut Diff<'_>) -> Result<()> {
        if current.old.is_none() {
            change.old = None;
            if change.new.is_none() {
                return Ok(());
            }
        }
        match change.key.item_type {
            KeyType::INODE_ITEM => {}
            KeyType::INODE_REF | KeyType::INODE_EXTREF => match (&current.old, &change.new) {
                (None, Some(item)) => self.new.add_links(&change.key, item, &mut current.links)?,
                _ => current.links_changed = true,
            },
            KeyType::XATTR_ITEM => {
                self.begin(current)?;
                self.xattrs(current, &change)?;
            }
            KeyType::EXTENT_DATA => {
                self.begin(current)?;
                self.extent(current, &change)?;
            }
            KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
                self.begin(current)?;
                diff.skip_to(&Key::new(current.ino, KeyType::EXTENT_DATA, 0))?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Creates a new inode, or adds names to an inode that both trees have. Does nothing if called again for the inode.
    fn begin(&mut self, current: &mut SentInode) -> Result<()> {
        if current.begun.is_some() {
            return Ok(());
        }
        let ino = current.ino;
        let is_kept = current.old.is_some();
        let mut is_changed = !is_kept;
        let path: Arc<[u8]> = if ino == Ino::ROOT_DIR.0 {
            Arc::default()
        } else if !is_kept {
            self.create(current)?.into()
        } else if current.links_changed || self.moved.relinked.contains(&ino) {
            is_changed = true;
            self.add_names(ino)?.into()
        } else {
            self.new.any_path(ino)?.into()
        };
        let file = if is_regular(&current.item) {
            let present = current.old.as_ref().map_or(0, |old| old.size);
            let verify = !InodeFlags::from_bits_retain(current.item.flags).contains(InodeFlags::NODATASUM);
            let id = (self.new.id(), ino);
            let sizes = (present, current.item.size);
            Some(FileDiff::begin(self.fs, id, Arc::clone(&path), sizes, verify, self.options))
        } else {
            None
        };
        current.begun = Some(BegunInode { path, file, is_changed, has_new_capability: false, has_inherited: false });
        Ok(())
    }

    /// Creates an inode with all of its names. Returns its path.
    fn create(&mut self, current: &mut SentInode) -> Result<Vec<u8>> {
        let (ino, item) = (current.ino, &current.item);
        let mut links = std::mem::take(&mut current.links);
        links.sort_unstable();
        for link in &links {
            self.make_above(link.parent, ino)?;
        }
        let mut links = links.into_iter();
        let first = links.next().ok_or_else(|| self.new.wrong("inode without a name", ino, "expected an INODE_REF"))?;
        let path = self.new.path_of(&first)?;
        if !(is_dir(item) && self.moved.made.contains(&ino)) {
            self.make(ino, item, &path)?;
            self.touch(first.parent)?;
        }
        for link in links {
            self.link(&link, &path)?;
        }
        Ok(path)
    }

    fn make(&mut self, ino: u64, item: &InodeItem, path: &[u8]) -> Result<()> {
        let (rdev, mode) = (u64::from(rdev_of_item(item)), u64::from(item.mode));
        let target;
        let command = match FileType::from_mode(item.mode) {
            Some(FileType::Regular) => StreamCommand::Mkfile { path, ino },
            Some(FileType::Directory) => StreamCommand::Mkdir { path, ino },
            Some(FileType::CharDevice | FileType::BlockDevice) => StreamCommand::Mknod { path, ino, rdev, mode },
            Some(FileType::Fifo) => StreamCommand::Mkfifo { path, ino, rdev: 0, mode },
            Some(FileType::Socket) => StreamCommand::Mksock { path, ino, rdev: 0, mode },
            Some(FileType::Symlink) => {
                target = self.symlink_target(ino)?;
                StreamCommand::Symlink { path, ino, target: &target }
            }
            Some(FileType::Xattr) | None => {
                return Err(self.new.wrong("mode of inode", ino, "expected a known type of file"));
            }
        };
        self.pipeline.command(&command)
    }

    fn symlink_target(&self, ino: u64) -> Result<Vec<u8>> {
        let key = Key::new(ino, KeyType::EXTENT_DATA, 0);
        let missing = || self.new.wrong("symbolic link", ino, "expected an inline extent");
        let item = self.new.get(&key)?.ok_or_else(missing)?;
        let extent = self.decode(self.new, &key, &item)?.extent;
        link_target(extent.body).filter(|target| !target.is_empty()).ok_or_else(missing)
    }

    /// Adds a name to an inode.
    fn link(&mut self, link: &InodeLink, target: &[u8]) -> Result<()> {
        let path = self.new.path_of(link)?;
        self.pipeline.command(&StreamCommand::Link { path: &path, target })?;
        self.touch(link.parent)
    }

    /// Adds the new names of an inode that both trees have, after removals and moves. Returns one of the inode's paths.
    fn add_names(&mut self, ino: u64) -> Result<Vec<u8>> {
        let Some(old) = self.old else { return self.new.any_path(ino) };
        let (_, stays, comes) = Moves::new(old, self.new).compare(ino)?;
        // If no old name stays, a move has already renamed the inode to the first new name.
        let nr_done = usize::from(stays.is_empty());
        let first = stays.first().or(comes.first()).cloned();
        let first = first.ok_or_else(|| self.new.wrong("inode without a name", ino, "expected an INODE_REF"))?;
        let path = self.new.path_of(&first)?;
        for link in comes.iter().skip(nr_done) {
            self.make_above(link.parent, ino)?;
            self.link(link, &path)?;
        }
        Ok(path)
    }

    /// Makes a directory and the directories above it, if the receiver does not have them yet (S2). The receiver has
    /// all inodes with numbers below `ino`.
    fn make_above(&mut self, dir: u64, ino: u64) -> Result<()> {
        let mut missing = Vec::new();
        let mut at = dir;
        while at >= ino && !self.there.contains(&at) && !self.moved.made.contains(&at) {
            if self.is_kept(at)? {
                break;
            }
            missing.push(at);
            at = self.new.first_link(at)?.parent;
            if missing.len() > DEPTH_MAX {
                return Err(self.new.wrong("directory", dir, "expected a path of at most 4096 names to the root"));
            }
        }
        if at >= ino {
            if self.there.len() > THERE_MAX {
                self.there.clear();
            }
            self.there.insert(at);
        }
        for dir in missing.into_iter().rev() {
            let link = self.new.first_link(dir)?;
            let path = self.new.path_of(&link)?;
            self.bare(link.parent, &self.new.dir_path(link.parent)?, link.parent < ino)?;
            self.pipeline.command(&StreamCommand::Mkdir { path: &path, ino: dir })?;
            self.moved.made.insert(dir);
            self.touch(link.parent)?;
        }
        // The next command creates a name in the directory, so remove the attributes that new files would inherit.
        if self.old.is_some() { self.bare(dir, &self.new.dir_path(dir)?, dir < ino) } else { Ok(()) }
    }

    /// Removes attributes that new files would inherit from a directory that both trees have (S4). `is_done` says that
    /// the directory's own attributes were sent already.
    fn bare(&mut self, dir: u64, path: &[u8], is_done: bool) -> Result<()> {
        let Some(old) = self.old else { return Ok(()) };
        if !self.bared.insert(dir) || !self.is_kept(dir)? {
            return Ok(());
        }
        for name in INHERITED {
            let is_gone = is_done && self.new.xattr(dir, name)?.is_none();
            if !is_gone && old.xattr(dir, name)?.is_some() {
                self.pipeline.command(&StreamCommand::RemoveXattr { path, name })?;
                self.inherited.push(dir);
            }
        }
        Ok(())
    }

    fn xattrs(&mut self, current: &mut SentInode, change: &ItemChange) -> Result<()> {
        let Some(begun) = &mut current.begun else { return Ok(()) };
        let entries = |tree: &SentTree, item: &Option<ubtrfs_tree::Item>| -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
            let Some(item) = item else { return Ok(BTreeMap::new()) };
            let entries = DirItem::decode_all(item).map_err(|cause| tree.corrupt(cause))?;
            Ok(entries.into_iter().map(|entry| (entry.name, entry.data)).collect())
        };
        let before = entries(self.old.unwrap_or(self.new), &change.old)?;
        let after = entries(self.new, &change.new)?;
        let is_directory = is_dir(&current.item);
        for name in before.keys().filter(|name| !after.contains_key(*name)) {
            begun.is_changed = true;
            // `bare` may have removed the attribute already.
            if is_directory && INHERITED.contains(&&name[..]) && self.inherited.contains(&current.ino) {
                continue;
            }
            self.pipeline.command(&StreamCommand::RemoveXattr { path: &begun.path, name })?;
        }
        for (name, data) in after.iter().filter(|(name, data)| before.get(*name) != Some(data)) {
            begun.is_changed = true;
            if name == CAPABILITY {
                begun.has_new_capability = true;
            } else if is_directory && INHERITED.contains(&&name[..]) {
                begun.has_inherited = true;
            } else {
                self.pipeline.command(&StreamCommand::SetXattr { path: &begun.path, name, data })?;
            }
        }
        Ok(())
    }

    fn extent(&mut self, current: &mut SentInode, change: &ItemChange) -> Result<()> {
        let Some(file) = current.begun.as_mut().and_then(|begun| begun.file.as_mut()) else { return Ok(()) };
        let old = self.old.zip(change.old.as_ref()).map(|(old, item)| self.decode(old, &change.key, item));
        let new = change.new.as_ref().map(|item| self.decode(self.new, &change.key, item));
        let (old, new) = (old.transpose()?, new.transpose()?);
        file.push((old, new), &mut self.clones, self.pipeline)
    }

    fn decode(&self, tree: &SentTree, key: &Key, item: &[u8]) -> Result<ExtentAt> {
        decode_of(tree.id(), key, item, self.fs.geometry.sectorsize)
    }

    /// Sends everything that follows the data of an inode (S3).
    fn finish(&mut self, mut current: SentInode) -> Result<()> {
        self.begin(&mut current)?;
        let SentInode { ino, item, old, begun, .. } = current;
        let Some(BegunInode { path, mut file, mut is_changed, has_new_capability, has_inherited }) = begun else {
            return Ok(());
        };
        let mut data_changed = false;
        if let Some(file) = &mut file {
            file.finish(&mut self.clones, self.pipeline)?;
            data_changed = file.is_changed;
        }
        let owner = |item: &InodeItem| (item.uid, item.gid);
        let new_owner = old.as_ref().map(owner) != Some(owner(&item));
        if new_owner {
            let (uid, gid) = (item.uid.into(), item.gid.into());
            self.pipeline.command(&StreamCommand::Chown { path: &path, uid, gid })?;
        }
        let is_symlink = item.mode & mode::TYPE == mode::SYMLINK;
        let has_set_id = item.mode & (mode::SETUID | mode::SETGID) != 0;
        let new_mode = old.as_ref().is_none_or(|old| old.mode != item.mode);
        if !is_symlink && (new_mode || (has_set_id && (new_owner || data_changed))) {
            let permissions = u64::from(item.mode & mode::PERMISSIONS);
            self.pipeline.command(&StreamCommand::Chmod { path: &path, mode: permissions })?;
        }
        let may_be_lost = new_owner || data_changed || has_new_capability;
        if is_regular(&item)
            && may_be_lost
            && let Some(data) = self.new.xattr(ino, CAPABILITY)?
        {
            self.pipeline.command(&StreamCommand::SetXattr { path: &path, name: CAPABILITY, data: &data })?;
        }
        is_changed |= new_owner || new_mode || data_changed;
        let flags = |item: &InodeItem| item.flags & SENT_FLAGS.bits();
        let new_flags = flags(&item) != old.as_ref().map_or(0, flags);
        let has_new_item = old.as_ref() != Some(&item);
        if is_dir(&item) {
            if has_inherited {
                self.inherited.push(ino);
            }
            if is_changed || has_new_item {
                self.touch(ino)?;
            }
        } else if is_changed || has_new_item {
            self.send_times(&path, &item)?;
        }
        if new_flags && self.pipeline.version() >= StreamVersion::V2 {
            self.pipeline.command(&StreamCommand::Fileattr { path: &path, attr: item.flags })?;
        }
        Ok(())
    }

    /// Notes that the times of a directory change, and sends the times of another directory if the times of too many
    /// directories wait to be sent.
    fn touch(&mut self, dir: u64) -> Result<()> {
        match self.times.touch(dir) {
            Some(oldest) => self.send_dir_times(oldest),
            None => Ok(()),
        }
    }

    fn send_dir_times(&mut self, dir: u64) -> Result<()> {
        let Some(item) = self.new.inode(dir)? else { return Ok(()) };
        let path = self.new.dir_path(dir)?;
        self.send_times(&path, &item)
    }

    fn send_times(&mut self, path: &[u8], item: &InodeItem) -> Result<()> {
        let otime = (self.pipeline.version() >= StreamVersion::V2).then_some(item.otime);
        self.pipeline.command(&StreamCommand::Utimes {
            path,
            atime: item.atime,
            mtime: item.mtime,
            ctime: item.ctime,
            otime,
        })
    }

    /// Sends the default ACLs and the compression of directories, which were kept back so that new files do not inherit
    /// them (S4).
    fn send_inherited(&mut self) -> Result<()> {
        let mut dirs = std::mem::take(&mut self.inherited);
        dirs.sort_unstable();
        dirs.dedup();
        for dir in dirs {
            let path = self.new.dir_path(dir)?;
            for name in INHERITED {
                if let Some(data) = self.new.xattr(dir, name)? {
                    self.pipeline.command(&StreamCommand::SetXattr { path: &path, name, data: &data })?;
                }
            }
        }
        Ok(())
    }
}

fn has_name(item: &InodeItem) -> bool {
    item.nlink > 0
}

/// Skips the remaining items of an inode.
pub(super) fn skip_inode(diff: &mut Diff<'_>, ino: u64) -> Result<()> {
    match ino.checked_add(1) {
        Some(next) => Ok(diff.skip_to(&Key::new(next, KeyType(0), 0))?),
        None => Ok(()),
    }
}

/// Directories whose times have to be sent, in the order of their last change. If there are too many, the times of the
/// directory whose last change is the oldest are sent.
#[derive(Debug, Default)]
struct DirTimes {
    by_age: BTreeMap<u64, u64>,
    ages: HashMap<u64, u64>,
    clock: u64,
}

impl DirTimes {
    /// Notes a change. If there are too many directories, returns the directory whose times have to be sent now.
    fn touch(&mut self, dir: u64) -> Option<u64> {
        self.clock = self.clock.saturating_add(1);
        if let Some(age) = self.ages.insert(dir, self.clock) {
            self.by_age.remove(&age);
        }
        self.by_age.insert(self.clock, dir);
        if self.by_age.len() > DIRS_MAX { self.pop() } else { None }
    }

    /// Takes the directory that has not changed for the longest time.
    fn pop(&mut self) -> Option<u64> {
        let (_, dir) = self.by_age.pop_first()?;
        self.ages.remove(&dir);
        Some(dir)
    }
}

/// Attributes of a directory that new files in it inherit.
const INHERITED: [&[u8]; 2] = [b"system.posix_acl_default", b"btrfs.compression"];
/// Inode flags that users set.
const SENT_FLAGS: InodeFlags = InodeFlags::NODATACOW
    .union(InodeFlags::NOCOMPRESS)
    .union(InodeFlags::SYNC)
    .union(InodeFlags::IMMUTABLE)
    .union(InodeFlags::APPEND)
    .union(InodeFlags::NODUMP)
    .union(InodeFlags::NOATIME)
    .union(InodeFlags::DIRSYNC)
    .union(InodeFlags::COMPRESS);
const DIRS_MAX: usize = 4096;
const THERE_MAX: usize = 50_000;
const DEPTH_MAX: usize = 4096;
