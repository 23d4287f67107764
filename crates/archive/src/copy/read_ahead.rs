//! Reads a directory of the host ahead of its copy: a thread walks it in the order of the copy, and reads attributes and
//! content while the copy writes what came before.
//!
//! Invariants:
//! - R1. The thread passes on every entry that it lists, in the order in which the copy asks for them: a directory before
//!   its entries, these sorted by name. The copy may skip the entries of a directory, and nothing else.
//! - R2. The thread leaves out everything that it cannot read. The copy tries to read that itself, and reports the error.
//! - R3. Not more than [`BATCHES`] batches wait, so memory does not grow with the files. Attributes and names count in a
//!   batch as content does.
//! - R4. The content of a file with several names is read once. If the copy wants it again, it reads it.
//! - R5. The thread has ended when [`ReadAhead`] is dropped. So nothing reads the source after a copy.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use ubtrfs_fs::mode;

use super::beneath::SourceTree;
use super::host::each_data;
use super::{SourceInfo, XattrList};
use crate::walk::{push_name, type_of};

/// The attributes of an entry, as far as the thread could read them.
pub(super) struct ReadEntry {
    path: Vec<u8>,
    info: Option<SourceInfo>,
    xattrs: Option<XattrList>,
    /// Of a directory.
    names: Option<Vec<Vec<u8>>>,
    /// Whether pieces of content follow.
    has_data: bool,
}

enum ReadPart {
    Entry(ReadEntry),
    /// A piece of the last entry's content: its offset and bytes.
    Piece(u64, Vec<u8>),
    /// The content is complete, or the rest cannot be read.
    End {
        complete: bool,
    },
}

/// A walk that is under way.
pub(super) struct ReadAhead {
    /// `None` when this value is dropped.
    from: Option<Receiver<Vec<ReadPart>>>,
    thread: Option<JoinHandle<()>>,
    arrived: VecDeque<ReadPart>,
    /// The entry that the copy asked for last.
    current: Option<ReadEntry>,
}

impl ReadAhead {
    /// Begins to read the entries with these names in a directory. `None` if the system admits no more threads.
    pub(super) fn below(tree: SourceTree, dir: &[u8], names: &[Vec<u8>]) -> Option<Self> {
        let (to, from) = sync_channel(BATCHES);
        let mut walk = Walk { tree, to, batch: Vec::new(), batch_bytes: 0, links: HashSet::new() };
        let (dir, names) = (dir.to_vec(), names.to_vec());
        let run = move || {
            // The copy has ended if this fails.
            let _ = walk.below(dir, names).and_then(|()| walk.pass_batch());
        };
        let thread = thread::Builder::new().name("read-ahead".to_owned()).spawn(run).ok()?;
        Some(Self { from: Some(from), thread: Some(thread), arrived: VecDeque::new(), current: None })
    }

    fn next(&mut self) -> Option<ReadPart> {
        if self.arrived.is_empty() {
            self.arrived = self.from.as_ref()?.recv().ok()?.into();
        }
        self.arrived.pop_front()
    }

    /// Goes on to the entry with this path. `None` if the walk has ended (R1).
    pub(super) fn enter(&mut self, path: &[u8]) -> Option<&mut ReadEntry> {
        self.current = None;
        loop {
            match self.next()? {
                ReadPart::Entry(entry) if entry.path == path => return Some(self.current.insert(entry)),
                ReadPart::Entry(_) | ReadPart::Piece(..) | ReadPart::End { .. } => {}
            }
        }
    }

    /// The entry with this path, if the copy asked for it last.
    pub(super) fn at(&mut self, path: &[u8]) -> Option<&mut ReadEntry> {
        self.current.as_mut().filter(|entry| entry.path == path)
    }

    /// Passes the content of the last entry to `piece`. Returns whether that is all of it.
    pub(super) fn data(&mut self, piece: super::PieceCallback<'_>) -> anyhow::Result<bool> {
        if !self.current.as_mut().is_some_and(|entry| std::mem::take(&mut entry.has_data)) {
            return Ok(false);
        }
        loop {
            match self.next() {
                Some(ReadPart::Piece(at, bytes)) => piece(at, &bytes)?,
                Some(ReadPart::End { complete }) => return Ok(complete),
                Some(ReadPart::Entry(_)) | None => return Ok(false),
            }
        }
    }
}

impl Drop for ReadAhead {
    /// Ends the thread (R5), which fails to pass on the next batch.
    fn drop(&mut self) {
        self.from = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl ReadEntry {
    pub(super) fn info(&self) -> Option<SourceInfo> {
        self.info.clone()
    }

    pub(super) fn take_xattrs(&mut self) -> Option<XattrList> {
        self.xattrs.take()
    }

    pub(super) fn take_names(&mut self) -> Option<Vec<Vec<u8>>> {
        self.names.take()
    }
}

impl ReadEntry {
    /// Bytes in memory, for the limit of a batch (R3).
    fn bytes(&self) -> usize {
        let xattrs = self.xattrs.iter().flatten().map(|(name, value)| name.len() + value.len() + PART_BYTES);
        let names = self.names.iter().flatten().map(|name| name.len() + PART_BYTES);
        ENTRY_BYTES + self.path.len() + xattrs.chain(names).sum::<usize>()
    }
}

/// The copy has ended.
struct CopyEnded;

struct Walk {
    tree: SourceTree,
    to: SyncSender<Vec<ReadPart>>,
    batch: Vec<ReadPart>,
    batch_bytes: usize,
    /// The files with several names whose content was read (R4).
    links: HashSet<(u64, u64)>,
}

impl Walk {
    fn below(&mut self, mut path: Vec<u8>, names: Vec<Vec<u8>>) -> Result<(), CopyEnded> {
        let mut todo = Vec::new();
        let queue = |todo: &mut Vec<(usize, Vec<u8>)>, dir_len: usize, mut names: Vec<Vec<u8>>| {
            names.sort_unstable();
            todo.extend(names.into_iter().rev().map(|name| (dir_len, name)));
        };
        queue(&mut todo, path.len(), names);
        while let Some((dir_len, name)) = todo.pop() {
            path.truncate(dir_len);
            push_name(&mut path, &name);
            let info = self.tree.info(&path).ok().flatten();
            let kind = info.as_ref().map(|info| type_of(info.mode));
            let names = if kind == Some(mode::DIRECTORY) { self.tree.names(&path).ok() } else { None };
            if let Some(names) = &names {
                queue(&mut todo, path.len(), names.clone());
            }
            let is_new = |info: &&SourceInfo| info.nlink < 2 || self.links.insert(info.identity);
            let read = info.as_ref().filter(|_| kind == Some(mode::REGULAR)).filter(is_new);
            let file = read.and_then(|info| self.tree.open_file(&path, info).ok());
            let xattrs = info.as_ref().and_then(|_| self.tree.xattrs(&path).ok());
            let size = info.as_ref().map_or(0, |info| info.size);
            let entry = ReadEntry { path: path.clone(), info, xattrs, names, has_data: file.is_some() };
            let bytes = entry.bytes();
            self.pass(ReadPart::Entry(entry), bytes)?;
            if let Some(file) = file {
                self.content(&file, size)?;
            }
        }
        Ok(())
    }

    fn content(&mut self, file: &File, size: u64) -> Result<(), CopyEnded> {
        let mut ended = Ok(());
        let read = each_data(file, size, &mut |at, len| {
            let mut bytes = vec![0; len.min(PIECE_LEN)];
            let count = file.read_at(&mut bytes, at)?;
            bytes.truncate(count);
            if count > 0 {
                ended = self.pass(ReadPart::Piece(at, bytes), count);
            }
            // Zero ends the reading.
            Ok(if ended.is_ok() { count } else { 0 })
        });
        ended?;
        self.pass(ReadPart::End { complete: read.is_ok() }, 0)
    }

    fn pass(&mut self, message: ReadPart, bytes: usize) -> Result<(), CopyEnded> {
        self.batch.push(message);
        self.batch_bytes += bytes;
        if self.batch_bytes < BATCH_BYTES { Ok(()) } else { self.pass_batch() }
    }

    fn pass_batch(&mut self) -> Result<(), CopyEnded> {
        self.batch_bytes = 0;
        self.to.send(std::mem::take(&mut self.batch)).map_err(|_| CopyEnded)
    }
}

/// How many batches wait for the copy (R3).
const BATCHES: usize = 8;

/// A batch is passed on when it holds so many bytes. It spares the two threads from waking each other for each file.
const BATCH_BYTES: usize = 256 << 10;

const PIECE_LEN: usize = 256 << 10;

/// The bytes that an entry counts in a batch, without its path, attributes and names.
const ENTRY_BYTES: usize = 1 << 10;

/// The bytes that an attribute or a name counts, without its text.
const PART_BYTES: usize = 48;

#[cfg(test)]
mod tests {
    use super::super::CopySource;
    use super::super::host::{HostFiles, info_at, xattrs_at};
    use super::*;

    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use crate::walk::os_string;

    /// Walks as a copy does, and returns the paths with the content of files. Skips what is below directories named "skip".
    fn walked(files: &HostFiles, dir: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        let mut todo = vec![dir.as_os_str().as_bytes().to_vec()];
        while let Some(path) = todo.pop() {
            let is_top = path == dir.as_os_str().as_bytes();
            let info = files.info(&path, is_top).unwrap().unwrap();
            let mut content = Vec::new();
            if info.is_dir() {
                if !path.ends_with(b"/skip") {
                    let mut names = files.names(&path).unwrap();
                    names.sort_unstable();
                    todo.extend(names.iter().rev().map(|name| [&path[..], b"/", name].concat()));
                }
            } else {
                assert_eq!(files.xattrs(&path).unwrap(), xattrs_at(&path).unwrap());
                let mut piece = |at: u64, bytes: &[u8]| {
                    content.resize(usize::try_from(at)?, 0);
                    content.extend_from_slice(bytes);
                    Ok(())
                };
                files.data(&path, &info, &mut piece).unwrap();
                content.resize(usize::try_from(info.size).unwrap(), 0);
            }
            found.push((path, content));
        }
        found
    }

    #[test]
    fn a_directory_is_read_in_order_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["a", "b", "skip", "skip/deep", "z"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        let large: Vec<u8> = (0..PIECE_LEN * 9 + 7).map(|byte| (byte % 251) as u8).collect();
        std::fs::write(at("a/large"), &large).unwrap();
        std::fs::write(at("b/empty"), "").unwrap();
        let sparse = File::create(at("b/sparse")).unwrap();
        sparse.write_all_at(b"end", 5 << 20).unwrap();
        sparse.set_len(6 << 20).unwrap();
        for number in 0..500 {
            std::fs::write(at(&format!("skip/deep/{number}")), "no").unwrap();
            std::fs::write(at(&format!("z/{number}")), number.to_string()).unwrap();
        }
        // Attributes whose list is short and long. Not every filesystem has attributes.
        let set = |file: &str, name: &str| {
            rustix::fs::setxattr(at(file), name, b"value", rustix::fs::XattrFlags::empty()).is_ok()
        };
        let count = |file: &str| xattrs_at(at(file).as_os_str().as_bytes()).unwrap().len();
        if set("b/empty", "user.a") {
            assert!((0..20).all(|number| set("a/large", &format!("user.{number:050}"))));
            assert_eq!((count("a/large"), count("b/empty")), (20, 1));
        }
        let files = HostFiles::default();
        // Two sources, one after the other.
        for top in [dir.path().to_owned(), at("z")] {
            let found = walked(&files, &top);
            let paths: Vec<_> = found.iter().map(|(path, _)| path.clone()).collect();
            assert!(paths.is_sorted_by(|one, next| one.split(|b| *b == b'/').le(next.split(|b| *b == b'/'))));
            let is_dir = |path: &Vec<u8>| Path::new(&os_string(path)).is_dir();
            for (path, content) in found.iter().filter(|(path, _)| !is_dir(path)) {
                assert!(content == &std::fs::read(os_string(path)).unwrap(), "{}", path.escape_ascii());
            }
            assert_eq!(found.len(), if top == dir.path() { 508 } else { 501 });
        }
    }

    #[test]
    fn the_walk_ends_with_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        let names: Vec<Vec<u8>> = (0..64).map(|number: u32| number.to_string().into_bytes()).collect();
        for name in &names {
            std::fs::write(dir.path().join(os_string(name)), vec![1; PIECE_LEN]).unwrap();
        }
        let (to, from) = sync_channel(BATCHES);
        let path = dir.path().as_os_str().as_bytes().to_vec();
        let info = info_at(&path, true).unwrap().unwrap();
        let tree = SourceTree::open(&path, &info, true).unwrap();
        let mut walk = Walk { tree, to, batch: Vec::new(), batch_bytes: 0, links: HashSet::new() };
        let walk = thread::spawn(move || walk.below(path, names).is_err());
        from.recv().unwrap();
        drop(from);
        assert!(walk.join().unwrap());
    }

    #[test]
    fn nothing_reads_the_source_after_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..64 {
            std::fs::write(dir.path().join(number.to_string()), vec![1; PIECE_LEN]).unwrap();
        }
        let open_files = || {
            let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|path| path.starts_with(dir.path()))).count()
        };
        let path = dir.path().as_os_str().as_bytes();
        for _ in 0..20 {
            let files = HostFiles::default();
            files.info(path, true).unwrap();
            assert_eq!(files.names(path).unwrap().len(), 64);
            assert!(open_files() > 0);
            drop(files);
            assert_eq!(open_files(), 0);
        }
    }

    #[test]
    fn attributes_and_names_count_and_content_of_links_is_read_once() {
        let long = vec![7; 60_000];
        let mut entry = ReadEntry { path: Vec::new(), info: None, xattrs: None, names: None, has_data: false };
        let few = entry.bytes();
        entry.xattrs = Some(vec![(b"user.a".to_vec(), long.clone()), (b"user.b".to_vec(), long)]);
        entry.names = Some(vec![vec![b'n'; 255]; 1000]);
        assert!(few < 2000 && entry.bytes() > 120_000 + 255_000);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), vec![1; PIECE_LEN]).unwrap();
        let mut names = vec![b"a".to_vec()];
        for number in 0..50 {
            names.push(format!("b{number:02}").into_bytes());
            std::fs::hard_link(dir.path().join("a"), dir.path().join(format!("b{number:02}"))).unwrap();
        }
        let path = dir.path().as_os_str().as_bytes();
        let info = info_at(path, true).unwrap().unwrap();
        let mut ahead = ReadAhead::below(SourceTree::open(path, &info, true).unwrap(), path, &names).unwrap();
        let parts: Vec<ReadPart> = std::iter::from_fn(|| ahead.next()).collect();
        let nr_pieces = parts.iter().filter(|part| matches!(part, ReadPart::Piece(..))).count();
        assert_eq!((nr_pieces, parts.len()), (1, 51 + 2));
    }
}
