//! Writes contents and attributes of an archive's files. If the archive is an uncompressed file, a separate thread
//! completes most files (writes their contents and attributes) while the main thread makes names. The separate thread
//! reads data directly into the buffers that writeback uses. The main thread completes files that replace existing
//! files, and files with large attributes.
//!
//! Invariants:
//! - I1. The code that makes a file also opens the file's inode. This module releases the inode when the file is
//!   complete or has failed.
//! - I2. Memory for files that wait for the separate thread is bounded: the queue holds at most [`QUEUE_LEN`] batches,
//!   and the sender and the receiver hold one more batch each. A batch has at most [`BATCH_FILES`] files, and the
//!   member of each file takes at most [`QUEUED_MEMBER_MAX`]. Files are batched because waking a thread costs more than
//!   writing a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

use anyhow::Context;
use ubtrfs_fs::{Caller, Fs, InodeId, SetAttr, SetTime, XattrFlags};

use super::{Fatal, ImportContext};
use crate::tar::read::{ArchiveReader, DATA_CUT_OFF};
use crate::tar::{ArchiveMember, MemberKind};
use crate::walk::printable;

/// Writes contents and attributes of members, but no names.
#[derive(Clone, Copy)]
pub(super) struct Contents<'a> {
    pub(super) fs: &'a Fs,
    pub(super) job: &'a ImportContext<'a>,
}

/// A file to complete, with the place of its data in the archive.
pub(super) struct QueuedFile {
    id: InodeId,
    member: ArchiveMember,
    place: (Arc<File>, u64),
}

/// The thread that completes files.
pub(super) struct ContentsThread<'scope> {
    fs: &'scope Fs,
    /// Files that are not sent yet.
    batch: Vec<QueuedFile>,
    /// The total data length of the files in `batch`.
    batch_bytes: u64,
    batches: SyncSender<Vec<QueuedFile>>,
    thread: ScopedJoinHandle<'scope, anyhow::Result<u64>>,
}

impl<'a> Contents<'a> {
    /// Writes contents and attributes of an opened file, in this thread or in the separate thread.
    pub(super) fn file(
        self,
        reader: &mut ArchiveReader,
        member: &ArchiveMember,
        id: InodeId,
        thread: Option<&mut ContentsThread<'_>>,
    ) -> anyhow::Result<()> {
        if let Some(thread) = thread
            && member.memory_bytes() <= QUEUED_MEMBER_MAX
            && let Some(place) = reader.place_of_data()
        {
            return thread.hand_over(QueuedFile { id, member: member.clone(), place });
        }
        let written = reader.for_each_piece(member, |offset, bytes| Ok(self.fs.write_all(id, offset, bytes)?));
        self.complete(member, id, written)
    }

    fn handed_file(self, file: &QueuedFile) -> anyhow::Result<()> {
        let (archive, mut at) = (&file.place.0, file.place.1);
        let mut write = || {
            for (offset, len) in file.member.data_ranges() {
                self.fs.write_with(file.id, offset, len, |piece, bytes| {
                    read_exact_at(archive, bytes, at + (piece - offset))
                })?;
                at += len;
            }
            Ok(())
        };
        let written = write();
        self.complete(&file.member, file.id, written)
    }

    /// Sets the size and the attributes of a file if its data was written. Releases the inode in any case (I1).
    fn complete(self, member: &ArchiveMember, id: InodeId, written: anyhow::Result<()>) -> anyhow::Result<()> {
        let end = member.data_ranges().last().map_or(0, |(offset, len)| offset + len);
        let completed = written.and_then(|()| {
            if end < member.size {
                let size = SetAttr { size: Some(member.size), ..SetAttr::default() };
                self.fs.setattr(id, &size, &Caller::ROOT)?;
            }
            self.attributes(member, id)
        });
        self.fs.release_inode(id);
        completed
    }

    /// Sets owner, mode and times, then extended attributes: an access ACL must follow the mode, and file capabilities
    /// must follow the data and the owner.
    pub(super) fn attributes(self, member: &ArchiveMember, id: InodeId) -> anyhow::Result<()> {
        self.fs.setattr(id, &self.set_attr(member), &Caller::ROOT)?;
        self.xattrs(&member.xattrs, id)
    }

    pub(super) fn xattrs(self, xattrs: &[(Vec<u8>, Vec<u8>)], id: InodeId) -> anyhow::Result<()> {
        for (name, value) in xattrs {
            self.fs
                .setxattr(id, name, value, XattrFlags::empty(), &Caller::ROOT)
                .with_context(|| format!("attribute {}", printable(name)))?;
        }
        Ok(())
    }

    pub(super) fn set_attr(self, member: &ArchiveMember) -> SetAttr {
        let (uid, gid) = self.owner(member);
        SetAttr {
            mode: (member.kind != MemberKind::Symlink).then_some(member.mode),
            uid: Some(uid),
            gid: Some(gid),
            atime: member.atime.map(SetTime::At),
            mtime: Some(SetTime::At(member.mtime)),
            ..SetAttr::default()
        }
    }

    pub(super) fn owner(self, member: &ArchiveMember) -> (u32, u32) {
        self.job.options.owner.unwrap_or((member.uid, member.gid))
    }
}

impl<'scope> ContentsThread<'scope> {
    pub(super) fn start<'env: 'scope>(
        scope: &'scope Scope<'scope, 'env>,
        contents: Contents<'env>,
    ) -> anyhow::Result<Self> {
        let (batches, handed) = sync_channel(QUEUE_LEN);
        let thread = std::thread::Builder::new()
            .name("contents".to_owned())
            .spawn_scoped(scope, move || run_thread(contents, &handed))
            .context("cannot start a thread")?;
        Ok(Self { fs: contents.fs, batch: Vec::new(), batch_bytes: 0, batches, thread })
    }

    fn hand_over(&mut self, file: QueuedFile) -> anyhow::Result<()> {
        self.batch_bytes = self.batch_bytes.saturating_add(file.member.data_bytes());
        self.batch.push(file);
        if self.batch.len() < BATCH_FILES && self.batch_bytes < BATCH_BYTES {
            return Ok(());
        }
        self.send()
    }

    fn send(&mut self) -> anyhow::Result<()> {
        self.batch_bytes = 0;
        self.batches.send(std::mem::take(&mut self.batch)).map_err(|back| {
            back.0.into_iter().for_each(|file| self.fs.release_inode(file.id));
            // Sending fails if an earlier file ended the separate thread. This error only ends the import; `finish`
            // returns the error of the earlier file, which is reported.
            Fatal("an earlier file failed").into()
        })
    }

    /// Waits until all files are complete, and returns the number of failed files. If an error ended the separate
    /// thread, returns this error.
    pub(super) fn finish(mut self) -> anyhow::Result<u64> {
        let sent = self.send();
        drop(self.batches);
        let nr_failed = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        sent.map(|()| nr_failed)
    }
}

/// Completes files, and returns the number of failed files. An error that ends the import ends this function.
fn run_thread(contents: Contents<'_>, batches: &Receiver<Vec<QueuedFile>>) -> anyhow::Result<u64> {
    let mut nr_failed = 0;
    for batch in batches {
        let mut files = batch.into_iter();
        let fatal = files.by_ref().find_map(|file| {
            let done = contents.handed_file(&file);
            let error = done.with_context(|| contents.job.cannot_import(&file.member.path)).err()?;
            nr_failed += 1;
            contents.job.report_skipped(error).err()
        });
        // Release the inodes of the remaining files (I1).
        if let Some(error) = fatal {
            files.chain(batches.iter().flatten()).for_each(|file| contents.fs.release_inode(file.id));
            return Err(error);
        }
    }
    Ok(nr_failed)
}

fn read_exact_at(file: &File, bytes: &mut [u8], at: u64) -> anyhow::Result<()> {
    file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Fatal(DATA_CUT_OFF).into(),
        _ => anyhow::Error::new(error).context("its data cannot be read"),
    })
}

/// The number of batches that can wait for the thread.
const QUEUE_LEN: usize = 4;
const BATCH_FILES: usize = 64;
const BATCH_BYTES: u64 = 1 << 20;
/// The separate thread gets a file only if the file's member takes at most this much memory.
const QUEUED_MEMBER_MAX: usize = 16 << 10;
