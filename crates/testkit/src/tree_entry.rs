//! A directory tree as a sorted list of everything that a user can see. Also compares two directory trees.
//!
//! I1. Holes and written zeros are equal content: a file is a size and a set of non-zero chunks.
//! I2. Modification times of placeholder directories are not compared. A placeholder is the empty directory, with
//!     inode number 2, that Linux shows in place of a nested subvolume in a snapshot; Linux sets the times of a
//!     placeholder at the lookup.
//! I3. Hard links are compared as groups: paths of one file must match, but inode numbers need not match.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{SeekFrom, seek};
use ubtrfs_format::{CsumType, objectid};

use crate::target::NodeKind;

/// The number of bytes of content that are hashed together.
pub(crate) const CHUNK_BYTES: usize = 128 << 10;

/// One path of a tree, with all its attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// The path, relative to the root of the tree; empty for the root.
    pub path: Vec<u8>,
    /// Type of the inode.
    pub kind: NodeKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes of a file's content or of a symlink's target, or a directory's size.
    pub size: u64,
    /// Link count, as stat reports it.
    pub nlink: u64,
    /// For a file with several links, the file's first path in sorted order.
    pub link_group: Option<Vec<u8>>,
    /// Device number, major and minor.
    pub rdev: (u32, u32),
    /// Modification time: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Hash of a file's content or a symlink's target.
    pub content: u64,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The parts of two trees that must be equal.
#[derive(Clone, Copy, Debug)]
pub struct Compare {
    /// Modification times.
    pub mtime: bool,
    /// Sizes of directories: equal on two btrfs filesystems, different on others.
    pub dir_size: bool,
    /// Link counts of directories: 1 on btrfs, more elsewhere.
    pub dir_nlink: bool,
    /// Extended attributes.
    pub xattrs: bool,
    /// Mode, owner, modification time and extended attributes of the root.
    pub root: bool,
}

impl Compare {
    /// Compares everything: for two views of one btrfs.
    pub const ALL: Self = Self { mtime: true, dir_size: true, dir_nlink: true, xattrs: true, root: true };
    /// Compares everything that a copy to any filesystem keeps.
    pub const COPY: Self = Self { mtime: true, dir_size: false, dir_nlink: false, xattrs: true, root: false };
    /// Compares everything that the reference model knows.
    pub const MODEL: Self = Self { mtime: false, dir_size: false, dir_nlink: false, xattrs: true, root: false };
}

/// Compares two trees. Returns the number of entries. An error has the number of differences, and lists the first 40.
pub fn compare_trees(a: &Path, b: &Path, what: Compare) -> Result<usize> {
    let left = walk_path(a)?;
    let right = walk_path(b)?;
    compare_entries(&left, &right, what).with_context(|| format!("{} and {} differ", a.display(), b.display()))?;
    Ok(left.len())
}

/// Compares the entries of two trees.
pub fn compare_entries(a: &[TreeEntry], b: &[TreeEntry], what: Compare) -> Result<()> {
    let mut differences = Vec::new();
    let left: BTreeMap<&[u8], &TreeEntry> = a.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
    let right: BTreeMap<&[u8], &TreeEntry> = b.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
    for (path, entry) in &left {
        match right.get(path) {
            None => differences.push(format!("{}: only in the first", show(path))),
            Some(other) => differences.extend(difference(entry, other, what)),
        }
    }
    for path in right.keys().filter(|path| !left.contains_key(*path)) {
        differences.push(format!("{}: only in the second", show(path)));
    }
    if differences.is_empty() {
        return Ok(());
    }
    let shown = differences.iter().take(40).map(String::as_str).collect::<Vec<_>>().join("\n  ");
    bail!("{} differences:\n  {shown}", differences.len())
}

fn difference(a: &TreeEntry, b: &TreeEntry, what: Compare) -> Option<String> {
    let mut parts = Vec::new();
    let mut part = |name: &str, same: bool, left: &dyn std::fmt::Debug, right: &dyn std::fmt::Debug| {
        if !same {
            parts.push(format!("{name} {left:?} / {right:?}"));
        }
    };
    part("type", a.kind == b.kind, &a.kind, &b.kind);
    let root = a.path.is_empty();
    let directory = a.kind == NodeKind::Directory;
    if !root || what.root {
        part("mode", a.mode == b.mode, &format!("{:o}", a.mode), &format!("{:o}", b.mode));
        part("owner", (a.uid, a.gid) == (b.uid, b.gid), &(a.uid, a.gid), &(b.uid, b.gid));
        part("mtime", !what.mtime || a.mtime == b.mtime, &a.mtime, &b.mtime);
        part("xattrs", !what.xattrs || a.xattrs == b.xattrs, &show_xattrs(a), &show_xattrs(b));
    }
    part("size", (directory && !what.dir_size) || a.size == b.size, &a.size, &b.size);
    part("nlink", (directory && !what.dir_nlink) || a.nlink == b.nlink, &a.nlink, &b.nlink);
    part("links", a.link_group == b.link_group, &shown(&a.link_group), &shown(&b.link_group));
    part("rdev", a.rdev == b.rdev, &a.rdev, &b.rdev);
    part("content", a.content == b.content, &a.content, &b.content);
    if parts.is_empty() { None } else { Some(format!("{}: {}", show(&a.path), parts.join("; "))) }
}

/// Computes a digest of everything that `walk_path` finds, including modification times and directory sizes.
pub fn tree_digest(root: &Path) -> Result<u64> {
    let mut text = Vec::new();
    for entry in walk_path(root)? {
        text.extend_from_slice(format!("{entry:?}\n").as_bytes());
    }
    Ok(xxh64(&text))
}

/// Returns everything below a directory of the running system, including subvolumes, sorted by path.
pub fn walk_path(root: &Path) -> Result<Vec<TreeEntry>> {
    let mut entries = Vec::new();
    let mut identities: HashMap<(u64, u64), Vec<usize>> = HashMap::new();
    let mut stack = vec![Vec::new()];
    while let Some(path) = stack.pop() {
        let full = root.join(OsStr::from_bytes(&path));
        let meta = std::fs::symlink_metadata(&full).with_context(|| format!("stat {}", full.display()))?;
        let entry = entry_of(&full, path.clone(), &meta).with_context(|| format!("read {}", full.display()))?;
        if entry.kind == NodeKind::Directory {
            for child in std::fs::read_dir(&full).with_context(|| format!("list {}", full.display()))? {
                stack.push(join(&path, child?.file_name().as_bytes()));
            }
        } else if meta.nlink() > 1 {
            identities.entry((meta.dev(), meta.ino())).or_default().push(entries.len());
        }
        entries.push(entry);
    }
    set_link_groups(&mut entries, identities.into_values());
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}

/// Sets `link_group` of the hard links of each file to the file's first path in sorted order. Each element of `groups`
/// has the indexes of the entries of one file.
pub(crate) fn set_link_groups(entries: &mut [TreeEntry], groups: impl Iterator<Item = Vec<usize>>) {
    for group in groups {
        let first = group.iter().map(|&index| &entries[index].path).min().cloned();
        for index in group {
            entries[index].link_group.clone_from(&first);
        }
    }
}

fn entry_of(full: &Path, path: Vec<u8>, meta: &std::fs::Metadata) -> Result<TreeEntry> {
    let file_type = meta.file_type();
    let kind = match () {
        () if file_type.is_file() => NodeKind::File,
        () if file_type.is_dir() => NodeKind::Directory,
        () if file_type.is_symlink() => NodeKind::Symlink,
        () if file_type.is_fifo() => NodeKind::Fifo,
        () if file_type.is_socket() => NodeKind::Socket,
        () if file_type.is_char_device() => NodeKind::CharDevice,
        () => NodeKind::BlockDevice,
    };
    let content = match kind {
        NodeKind::File => digest_file(full)?,
        NodeKind::Symlink => xxh64(std::fs::read_link(full)?.as_os_str().as_bytes()),
        _ => 0,
    };
    Ok(TreeEntry {
        path,
        kind,
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        size: meta.size(),
        nlink: meta.nlink(),
        link_group: None,
        rdev: (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())),
        mtime: if is_stub(kind, meta.ino()) { (0, 0) } else { (meta.mtime(), u32::try_from(meta.mtime_nsec())?) },
        content,
        xattrs: read_xattrs(full)?,
    })
}

/// Whether a directory is a placeholder for a nested subvolume (I2), judged by its inode number in a mount of Linux
/// or of ubtrfs (`fuse::node`).
pub(crate) fn is_stub(kind: NodeKind, ino: u64) -> bool {
    kind == NodeKind::Directory && (ino == objectid::EMPTY_SUBVOL_DIR || ino >> 62 == 3)
}

fn read_xattrs(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut xattrs = BTreeMap::new();
    let mut names = vec![0u8; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(xattrs),
        Err(error) => return Err(error).context("llistxattr"),
    };
    for name in names[..len].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; 64 << 10];
        let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])
            .with_context(|| format!("getxattr {}", show(name)))?;
        value.truncate(len);
        xattrs.insert(name.to_vec(), value);
    }
    Ok(xattrs)
}

/// Hashes the content of a file with [`ContentHash`]. Skips holes without reading them.
pub(crate) fn digest_file(path: &Path) -> Result<u64> {
    let file = File::open(path)?;
    let len_bytes = file.metadata()?.len();
    let mut hash = ContentHash::new(len_bytes);
    let mut chunk = vec![0u8; CHUNK_BYTES];
    let mut at = 0u64;
    while at < len_bytes {
        match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => at = data - data % CHUNK_BYTES as u64,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => {} // The filesystem does not report holes, so read everything.
        }
        let len = usize::try_from((len_bytes - at).min(CHUNK_BYTES as u64))?;
        file.read_exact_at(&mut chunk[..len], at)?;
        hash.chunk(at / CHUNK_BYTES as u64, &chunk[..len]);
        at += CHUNK_BYTES as u64;
    }
    Ok(hash.finish())
}

/// A hash of a file's size, and of the number and hash of every chunk that is not all zeros.
#[derive(Debug)]
pub(crate) struct ContentHash {
    text: Vec<u8>,
}

impl ContentHash {
    /// Starts the hash of a file of this size.
    pub(crate) fn new(len_bytes: u64) -> Self {
        Self { text: len_bytes.to_le_bytes().to_vec() }
    }

    /// Adds a chunk. Chunks come in ascending order.
    pub(crate) fn chunk(&mut self, index: u64, data: &[u8]) {
        if data.iter().any(|&byte| byte != 0) {
            self.text.extend_from_slice(&index.to_le_bytes());
            let end = data.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1);
            self.text.extend_from_slice(&xxh64(&data[..end]).to_le_bytes());
        }
    }

    /// Returns the hash.
    pub(crate) fn finish(self) -> u64 {
        xxh64(&self.text)
    }
}

/// Computes a 64-bit hash of bytes.
pub(crate) fn xxh64(data: &[u8]) -> u64 {
    let csum = CsumType::Xxhash.compute(data);
    u64::from_le_bytes(csum[..8].try_into().expect("a checksum buffer is 32 bytes"))
}

/// Appends a name to a relative path.
pub(crate) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut out = path.to_vec();
    if !out.is_empty() {
        out.push(b'/');
    }
    out.extend_from_slice(name);
    out
}

/// Formats a path for messages.
pub(crate) fn show(path: &[u8]) -> String {
    if path.is_empty() { "(root)".to_owned() } else { path.escape_ascii().to_string() }
}

fn shown(path: &Option<Vec<u8>>) -> String {
    path.as_ref().map_or_else(|| "-".to_owned(), |path| show(path))
}

fn show_xattrs(entry: &TreeEntry) -> String {
    let one = |(name, value): (&Vec<u8>, &Vec<u8>)| {
        let cut = &value[..value.len().min(40)];
        format!("{}={} ({} bytes)", show(name), cut.escape_ascii(), value.len())
    };
    entry.xattrs.iter().map(one).collect::<Vec<_>>().join(", ")
}
