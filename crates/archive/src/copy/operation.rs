//! [`CopyOperation`]: walks the source of a copy, and makes each file at the target.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, bail};
use ubtrfs_format::clock::fixed_clock;
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{InodeId, mode};

use super::{
    CopiedAttributes, CopyMessage, CopyOptions, CopyReport, CopySource, CopyTarget, CopyWatch, PieceCallback,
    SourceInfo, XattrList,
};
use crate::walk::{VisitedDirs, printable, push_name, type_of};

/// A copy of files from one end to the other.
pub struct CopyOperation<'a> {
    options: &'a CopyOptions,
    from: &'a dyn CopySource,
    to: &'a dyn CopyTarget,
    watch: CopyWatch<'a>,
    /// Whether source and target are in one image.
    pub shared: bool,
    /// Whether directories are copied.
    pub recursive: bool,
    /// Device and inode of the image that is written to, which cannot be a source.
    pub own_files: &'a [(u64, u64)],
    /// Whether to stop when the target accepts no more data, because a partial copy is useless.
    pub ends_with_target: bool,
    /// Directories of the source image that the copy has visited.
    passed: VisitedDirs,
    /// If source and target are in one image, the directories that the copy made. In a crafted image, a walk of the
    /// source may lead into these copied directories.
    made: HashSet<InodeId>,
    /// The first copy of each file with several names.
    first_names: HashMap<(u64, u64), Vec<u8>>,
    report: CopyReport,
}

/// Work that is left. The paths of the directory are the parts of the current paths with these lengths, because paths of
/// their own would take memory that grows with the square of the depth.
struct PendingCopy {
    lens: (usize, usize),
    work: DirStep,
}

enum DirStep {
    /// Copies the entry with this name in the directory.
    Enter(Vec<u8>),
    /// Sets the attributes of the directory.
    Finish(SourceInfo),
}

impl<'a> CopyOperation<'a> {
    /// A copy that messages of `watch` accompany.
    pub fn new(
        options: &'a CopyOptions,
        from: &'a dyn CopySource,
        to: &'a dyn CopyTarget,
        watch: CopyWatch<'a>,
    ) -> Self {
        Self {
            options,
            from,
            to,
            watch,
            shared: false,
            recursive: true,
            own_files: &[],
            ends_with_target: false,
            passed: VisitedDirs::default(),
            made: HashSet::new(),
            first_names: HashMap::new(),
            report: CopyReport::default(),
        }
    }

    /// What was copied so far.
    pub fn report(&self) -> CopyReport {
        self.report
    }

    /// Copies a file, or a directory and everything below it. The depth is limited by memory, not by the stack. If a
    /// file inside the directory cannot be copied, the copy continues with the other files. A directory gets its
    /// attributes after the last change in it.
    pub fn tree(&mut self, mut path: Vec<u8>, mut new_path: Vec<u8>, info: SourceInfo) -> anyhow::Result<()> {
        let mut todo = Vec::new();
        let done = self.step(&path, &new_path, Some(info), &mut todo).with_context(|| printable(&path));
        let mut failure = done.err();
        while let Some(PendingCopy { lens, work }) = todo.pop() {
            path.truncate(lens.0);
            new_path.truncate(lens.1);
            let done = match work {
                DirStep::Finish(info) => self.finish(&path, &new_path, &info),
                // After a failure that ends the copy, only the attributes of directories are left to do.
                DirStep::Enter(_) if failure.is_some() => Ok(()),
                DirStep::Enter(name) => {
                    push_name(&mut path, &name);
                    push_name(&mut new_path, &name);
                    self.step(&path, &new_path, None, &mut todo)
                }
            };
            if let Err(error) = done.or_else(|error| self.failed(&path, &new_path, error)) {
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Copies a file, or makes a directory and queues its entries.
    fn step(
        &mut self,
        path: &[u8],
        new_path: &[u8],
        info: Option<SourceInfo>,
        todo: &mut Vec<PendingCopy>,
    ) -> anyhow::Result<()> {
        let named = info.is_some();
        (self.watch)(CopyMessage::File(path));
        let info = match info {
            Some(info) => info,
            None => self.from.info(path, false)?.context("it is gone")?,
        };
        if let Err(error) = self.one(path, new_path, &info, named) {
            // The file's other names must not become links to a copy that was not made.
            if self.first_names.get(&info.identity).is_some_and(|first| first == new_path) {
                self.first_names.remove(&info.identity);
            }
            return Err(error);
        }
        if info.is_dir() {
            let dir = info.id;
            let lens = (path.len(), new_path.len());
            todo.push(PendingCopy { lens, work: DirStep::Finish(info) });
            dir.map_or(Ok(()), |dir| self.passed.pass(dir))?;
            let mut names = self.from.names(path)?;
            names.sort_unstable();
            todo.extend(names.into_iter().rev().map(|name| PendingCopy { lens, work: DirStep::Enter(name) }));
        }
        Ok(())
    }

    /// Reports a file that could not be copied. Fails only if the other files could not be copied either.
    fn failed(&mut self, path: &[u8], new_path: &[u8], error: anyhow::Error) -> anyhow::Result<()> {
        let (from, to) = (self.from.shown_source(path), self.to.shown_path(new_path));
        let error = error.context(format!("cannot copy '{from}' to '{to}'"));
        if self.ends_with_target && self.to.takes_no_more(&error) {
            return Err(error);
        }
        (self.watch)(CopyMessage::Failed(&error));
        self.report.failed += 1;
        Ok(())
    }

    fn one(&mut self, path: &[u8], new_path: &[u8], info: &SourceInfo, named: bool) -> anyhow::Result<()> {
        if self.own_files.contains(&info.identity) {
            bail!("it is the image that the files are copied to");
        }
        let is_stream = named && !self.recursive && self.from.is_stream(info);
        let is_content = is_stream || type_of(info.mode) == mode::REGULAR;
        // As in GNU cp, content is written through an existing symbolic link, but a copied link or special file
        // replaces the existing link.
        let follow = is_content || (info.is_dir() && new_path == self.to.top());
        let there = self.to.there(new_path, named, follow)?;
        if let Some(there) = &there {
            if self.shared && there.identity == info.identity {
                bail!("source and target are the same file");
            }
            if there.is_dir() != info.is_dir() {
                let what = if there.is_dir() { "a directory" } else { "no directory" };
                bail!("'{}' exists and is {what}; remove it first", self.to.shown_path(new_path));
            }
        }
        if info.is_dir() {
            if !self.recursive {
                bail!("it is a directory; copy it with -r");
            }
            if info.id.is_some_and(|id| self.made.contains(&id)) {
                bail!("it is part of the copy itself, which is damage; check the image with: ubtrfs check");
            }
            let made = if there.is_none() { self.to.make_dir(new_path, info.mode)? } else { None };
            self.made.extend(made.filter(|_| self.shared));
            self.report.directories += 1;
            return Ok(());
        }
        let is_again = self.options.keep_hard_links && info.nlink > 1 && self.first_names.contains_key(&info.identity);
        if there.is_some() && (is_again || !is_content) {
            self.to.unlink(new_path)?;
        }
        if self.options.keep_hard_links && info.nlink > 1 {
            if let Some(first) = self.first_names.get(&info.identity) {
                match self.to.hard_link(first, new_path) {
                    // Links do not cross subvolumes. Further names link to this copy.
                    Err(error) if is_in_another_subvolume(&error) => {
                        (self.watch)(CopyMessage::SplitFile { first, other: new_path });
                    }
                    done => {
                        done?;
                        self.report.hard_links += 1;
                        return Ok(());
                    }
                }
            }
            self.first_names.insert(info.identity, new_path.to_vec());
        }
        match type_of(info.mode) {
            _ if is_content => {
                // The target can only use the source's inode if source and target are in one image.
                let id = info.id.filter(|_| self.shared);
                let size = if is_stream { 0 } else { info.size };
                let told =
                    SourceInfo { id, size, mode: mode::REGULAR | (info.mode & mode::PERMISSIONS), ..info.clone() };
                let attributes = self.attributes(path, info)?;
                let (from, watch, bytes) = (self.from, self.watch, &mut self.report.bytes);
                let mut fill = |piece: PieceCallback<'_>| {
                    from.data(path, info, &mut |offset, data| {
                        piece(offset, data)?;
                        *bytes += data.len() as u64;
                        watch(CopyMessage::Bytes(*bytes));
                        Ok(())
                    })
                };
                self.to.make_file(new_path, &told, named, &attributes, &mut fill)?;
                self.report.files += 1;
                return Ok(());
            }
            mode::SYMLINK => self.to.make_link(new_path, &self.from.read_link(path)?)?,
            _ => self.to.make_special(new_path, info)?,
        }
        self.finish(path, new_path, info)?;
        match type_of(info.mode) {
            mode::SYMLINK => self.report.symlinks += 1,
            _ => self.report.special_files += 1,
        }
        Ok(())
    }

    fn finish(&self, path: &[u8], new_path: &[u8], info: &SourceInfo) -> anyhow::Result<()> {
        self.to.set_attributes(new_path, &self.attributes(path, info)?)
    }

    fn attributes(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<CopiedAttributes> {
        let options = self.options;
        let owner = match options.owner {
            None if options.keep_owner => Some(options.owners.owner_of((info.uid, info.gid))?),
            owner => owner,
        };
        Ok(CopiedAttributes {
            owner,
            mode: info.mode,
            xattrs: if options.keep_xattrs { self.from.xattrs(path)? } else { XattrList::new() },
            times: options.keep_times.then(|| kept_times(info)),
        })
    }
}

fn is_in_another_subvolume(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ubtrfs_fs::Error::CrossDevice))
}

/// The times of a copy. With a fixed clock, reading the source changes nothing, and no time is later than the clock's.
fn kept_times(info: &SourceInfo) -> (Timespec, Timespec) {
    match fixed_clock() {
        None => (info.atime, info.mtime),
        Some(latest) => {
            let is_later = (info.mtime.sec, info.mtime.nsec) > (latest.sec, latest.nsec);
            let time = if is_later { latest } else { info.mtime };
            (time, time)
        }
    }
}
