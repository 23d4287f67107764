//! [`Operations`]: random operations that make differences which are hard to send: storms of renames, swaps and
//! rotations of directories, a directory that moves below its former child, names used again, links, reflinks, holes,
//! files that are truncated and later get their old extents back, flags, times, ACLs and capabilities.

use std::collections::BTreeMap;

use crate::model::CAPABILITY;
use crate::rng::Rng;
use crate::target::{FallocateOp, NodeKind, RenameOp, Target};

/// Makes random operations on a tree, and keeps a list of the names in the tree.
#[derive(Debug)]
pub struct Operations {
    rng: Rng,
    nodes: BTreeMap<Vec<u8>, NodeKind>,
    /// The timestamp that was set last, in seconds.
    clock: i64,
    /// Files that were truncated, each with the file that has a reflink of its former content.
    shrunk: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Operations {
    /// Starts with an empty tree.
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), nodes: BTreeMap::new(), clock: 1_000_000, shrunk: Vec::new() }
    }

    /// Makes about `count` operations. Operations that the filesystem refuses are ignored.
    pub fn run(&mut self, target: &mut dyn Target, count: usize) {
        let storm = self.rng.below(4);
        // Grow the files that were truncated before the last snapshot, so that the next snapshot has other extents at
        // their ends.
        for (path, backup) in std::mem::take(&mut self.shrunk) {
            self.regrow(target, &path, &backup);
        }
        for _ in 0..count {
            match storm {
                0 => self.names(target),
                1 => self.data(target),
                _ if self.rng.one_in(2) => self.names(target),
                _ => self.data(target),
            }
            if self.rng.one_in(8) {
                self.attributes(target);
            }
        }
    }

    fn any(&mut self, wanted: impl Fn(NodeKind) -> bool) -> Option<Vec<u8>> {
        let found: Vec<&Vec<u8>> = self.nodes.iter().filter(|(_, kind)| wanted(**kind)).map(|(path, _)| path).collect();
        if found.is_empty() { None } else { Some((*self.rng.pick(&found)).clone()) }
    }

    fn file(&mut self) -> Option<Vec<u8>> {
        self.any(|kind| kind == NodeKind::File)
    }

    fn dir(&mut self) -> Vec<u8> {
        if self.rng.one_in(4) {
            return Vec::new();
        }
        self.any(|kind| kind == NodeKind::Directory).unwrap_or_default()
    }

    /// Returns a path that may be in use.
    fn new_path(&mut self) -> Vec<u8> {
        let mut path = self.dir();
        if !path.is_empty() {
            path.push(b'/');
        }
        // Use few different names, so that a new name often exists already.
        path.extend_from_slice(
            format!("{}{}", ["a", "b", "dir", "x"][self.rng.index(4)], self.rng.below(4)).as_bytes(),
        );
        path
    }

    fn names(&mut self, target: &mut dyn Target) {
        match self.rng.below(20) {
            0..=4 => self.create(target),
            5..=9 => self.rename(target),
            10 | 11 => self.exchange(target),
            12 => self.rotate(target),
            13 => self.swap_with_parent(target),
            14 | 15 => self.link(target),
            16 | 17 => self.remove(target),
            18 => self.replace(target),
            _ => self.remove_tree(target),
        }
    }

    fn create(&mut self, target: &mut dyn Target) {
        let path = self.new_path();
        let kinds = [
            NodeKind::Directory,
            NodeKind::Directory,
            NodeKind::File,
            NodeKind::File,
            NodeKind::File,
            NodeKind::Symlink,
            NodeKind::Fifo,
            NodeKind::Socket,
            NodeKind::CharDevice,
            NodeKind::BlockDevice,
        ];
        let kind = if self.rng.one_in(3) { *self.rng.pick(&kinds) } else { kinds[self.rng.index(5)] };
        let done = match kind {
            NodeKind::Symlink => target.symlink(&path, format!("to/{}", self.rng.below(100)).as_bytes()),
            _ => target.create(&path, kind, [0o644, 0o755, 0o4755, 0o600, 0o2770][self.rng.index(5)], (12, 345_678)),
        };
        if done.is_ok() {
            self.nodes.insert(path.clone(), kind);
            if kind == NodeKind::File && !self.rng.one_in(3) {
                self.write(target, &path);
            }
        }
    }

    fn rename(&mut self, target: &mut dyn Target) {
        let Some(from) = self.any(|_| true) else { return };
        let to = self.new_path();
        self.rename_to(target, &from, &to);
    }

    fn rename_to(&mut self, target: &mut dyn Target, from: &[u8], to: &[u8]) -> bool {
        if self.nodes.contains_key(to) || target.rename(from, to, RenameOp::NoReplace).is_err() {
            return false;
        }
        self.moved(from, to);
        true
    }

    fn moved(&mut self, from: &[u8], to: &[u8]) {
        for (path, kind) in self.taken(from) {
            self.nodes.insert([to, &path[from.len()..]].concat(), kind);
        }
    }

    /// Removes a path and everything below it from the known names, and returns the removed names.
    fn taken(&mut self, from: &[u8]) -> Vec<(Vec<u8>, NodeKind)> {
        let below = |path: &[u8]| path == from || (path.starts_with(from) && path.get(from.len()) == Some(&b'/'));
        let paths: Vec<Vec<u8>> = self.nodes.keys().filter(|path| below(path)).cloned().collect();
        paths.into_iter().filter_map(|path| self.nodes.remove_entry(&path)).collect()
    }

    fn exchange(&mut self, target: &mut dyn Target) {
        let (Some(one), Some(other)) = (self.any(|_| true), self.any(|_| true)) else { return };
        if one == other || target.rename(&one, &other, RenameOp::Exchange).is_err() {
            return;
        }
        let (first, second) = (self.taken(&one), self.taken(&other));
        for (path, kind) in first {
            self.nodes.insert([&other[..], &path[one.len()..]].concat(), kind);
        }
        for (path, kind) in second {
            self.nodes.insert([&one[..], &path[other.len()..]].concat(), kind);
        }
    }

    /// Rotates three names among their inodes.
    fn rotate(&mut self, target: &mut dyn Target) {
        let nodes: Vec<Vec<u8>> = (0..3).filter_map(|_| self.any(|_| true)).collect();
        let [one, two, three] = &nodes[..] else { return };
        let aside = b"aside".to_vec();
        if one == two || two == three || one == three || !self.rename_to(target, one, &aside) {
            return;
        }
        // If one path is below another, some of these renames fail.
        self.rename_to(target, two, one);
        self.rename_to(target, three, two);
        if !self.rename_to(target, &aside, three) {
            let free = format!("free{}", self.rng.below(1 << 30)).into_bytes();
            self.rename_to(target, &aside, &free);
        }
    }

    /// Swaps a directory `a/b` with its parent `a`: the former child becomes the parent and gets the name `a`. The
    /// former parent gets the name `b` or `was-above`.
    fn swap_with_parent(&mut self, target: &mut dyn Target) {
        let Some(child) = self.any(|kind| kind == NodeKind::Directory) else { return };
        let Some(at) = child.iter().rposition(|byte| *byte == b'/') else { return };
        let (parent, name) = (child[..at].to_vec(), child[at + 1..].to_vec());
        let aside = b"aside".to_vec();
        if !self.rename_to(target, &child, &aside) {
            return;
        }
        let inside = [&b"aside/"[..], if self.rng.one_in(2) { &name } else { b"was-above" }].concat();
        if !self.rename_to(target, &parent, &inside) {
            self.rename_to(target, &aside, &child);
            return;
        }
        if !self.rename_to(target, &aside, &parent) {
            let free = format!("free{}", self.rng.below(1 << 30)).into_bytes();
            self.rename_to(target, &aside, &free);
        }
    }

    fn link(&mut self, target: &mut dyn Target) {
        let Some(from) = self.any(|kind| kind != NodeKind::Directory) else { return };
        let to = self.new_path();
        if target.link(&from, &to).is_ok() {
            let kind = self.nodes[&from];
            self.nodes.insert(to, kind);
        }
    }

    fn remove(&mut self, target: &mut dyn Target) {
        let Some(path) = self.any(|_| true) else { return };
        self.remove_one(target, &path);
    }

    fn remove_one(&mut self, target: &mut dyn Target, path: &[u8]) {
        let done = match self.nodes.get(path) {
            Some(NodeKind::Directory) => target.rmdir(path),
            _ => target.unlink(path),
        };
        if done.is_ok() {
            self.nodes.remove(path);
        }
    }

    /// Removes a name, and makes a new inode under that name: a directory, or, if the name was a directory, in half of
    /// the cases a regular file.
    fn replace(&mut self, target: &mut dyn Target) {
        let Some(path) = self.any(|_| true) else { return };
        let was = self.nodes[&path];
        self.remove_one(target, &path);
        let kind = if was == NodeKind::Directory && self.rng.one_in(2) { NodeKind::File } else { NodeKind::Directory };
        if !self.nodes.contains_key(&path) && target.create(&path, kind, 0o755, (0, 0)).is_ok() {
            self.nodes.insert(path, kind);
        }
    }

    /// Removes a directory and its content. Some of the content is moved elsewhere first.
    fn remove_tree(&mut self, target: &mut dyn Target) {
        let Some(dir) = self.any(|kind| kind == NodeKind::Directory) else { return };
        let below: Vec<Vec<u8>> =
            self.nodes.keys().filter(|path| path.starts_with(&[&dir[..], b"/"].concat())).cloned().collect();
        for path in below.iter().rev() {
            if self.nodes.contains_key(path) {
                if self.rng.one_in(4) {
                    let to = self.new_path();
                    self.rename_to(target, path, &to);
                } else {
                    self.remove_one(target, path);
                }
            }
        }
        self.remove_one(target, &dir);
        if self.rng.one_in(2)
            && !self.nodes.contains_key(&dir)
            && target.create(&dir, NodeKind::Directory, 0o755, (0, 0)).is_ok()
        {
            self.nodes.insert(dir, NodeKind::Directory);
        }
    }

    fn data(&mut self, target: &mut dyn Target) {
        let Some(path) = self.file() else { return self.create(target) };
        match self.rng.below(14) {
            0..=4 => self.write(target, &path),
            12 => self.shrink(target, &path),
            13 => {
                let Some(index) = self.shrunk.len().checked_sub(1) else { return };
                let (path, backup) = self.shrunk.swap_remove(self.rng.index(index + 1));
                self.regrow(target, &path, &backup);
            }
            5 => {
                let size = self.offset();
                let _ = target.truncate(&path, size);
            }
            6 => self.fallocate(target, &path, FallocateOp::PunchHole),
            7 => self.fallocate(target, &path, FallocateOp::KeepSize),
            8 => self.fallocate(target, &path, FallocateOp::Allocate),
            _ => self.reflink(target, &path),
        }
    }

    fn write(&mut self, target: &mut dyn Target, path: &[u8]) {
        let len = match self.rng.below(4) {
            0 => self.rng.below(200) + 1,
            1 => 4096 * (1 + self.rng.below(4)),
            2 => self.rng.below(20_000) + 1,
            _ => self.rng.below(300_000) + 1,
        };
        let offset = self.offset();
        let len = usize::try_from(len).unwrap_or(1);
        let data = match self.rng.below(3) {
            0 => self.rng.bytes(len),
            1 => self.rng.text(len),
            _ => vec![u8::try_from(self.rng.below(255)).unwrap_or(0) + 1; len],
        };
        let _ = target.write(path, offset, &data);
    }

    fn offset(&mut self) -> u64 {
        match self.rng.below(4) {
            0 => 0,
            1 => 4096 * self.rng.below(64),
            2 => self.rng.below(300_000),
            _ => self.rng.below(5000),
        }
    }

    /// Truncates a file, usually inside a block. A reflink in another file keeps the old content.
    fn shrink(&mut self, target: &mut dyn Target, path: &[u8]) {
        let backup = format!("backup{}", self.rng.below(4)).into_bytes();
        if !self.nodes.contains_key(&backup) && target.create(&backup, NodeKind::File, 0o600, (0, 0)).is_ok() {
            self.nodes.insert(backup.clone(), NodeKind::File);
        }
        if path == backup || target.truncate(&backup, 0).is_err() {
            return;
        }
        let _ = target.copy_range(path, 0, &backup, 0, 1 << 30);
        let size = if self.rng.one_in(6) { 4096 * self.rng.below(8) } else { self.rng.below(20_000) };
        if target.truncate(path, size).is_ok() {
            self.shrunk.push((path.to_vec(), backup));
        }
    }

    /// Grows a truncated file, sometimes by cloning the file's former extents from `backup`.
    fn regrow(&mut self, target: &mut dyn Target, path: &[u8], backup: &[u8]) {
        match self.rng.below(8) {
            0..=3 => {
                let _ = target.copy_range(backup, 0, path, 0, 1 << 30);
            }
            4 => {
                // The file keeps its content before `block`, and gets back its former content from there on.
                let block = 4096 * (1 + self.rng.below(3));
                let _ = target.copy_range(backup, block, path, block, 1 << 30);
            }
            5 => {
                let size = self.offset();
                let _ = target.truncate(path, size);
            }
            6 => self.fallocate(target, path, FallocateOp::Allocate),
            _ => self.write(target, path),
        }
    }

    fn fallocate(&mut self, target: &mut dyn Target, path: &[u8], op: FallocateOp) {
        let (offset, len) = (self.offset(), self.rng.below(100_000) + 1);
        let _ = target.fallocate(path, offset, len, op);
    }

    fn reflink(&mut self, target: &mut dyn Target, from: &[u8]) {
        let Some(to) = self.file() else { return };
        if self.rng.one_in(3) {
            let _ = target.copy_range(from, 0, &to, 0, 1 << 30);
            return;
        }
        let (source, sink) = (4096 * self.rng.below(40), 4096 * self.rng.below(40));
        let len = 4096 * (1 + self.rng.below(20));
        // Skip copies between overlapping ranges of one file.
        if from != to || source + len <= sink || sink + len <= source {
            let _ = target.copy_range(from, source, &to, sink, len);
        }
    }

    fn attributes(&mut self, target: &mut dyn Target) {
        let Some(path) = self.any(|_| true) else { return };
        let kind = self.nodes[&path];
        match self.rng.below(11) {
            0 if kind != NodeKind::Symlink => {
                let _ = target.chmod(&path, [0o600, 0o644, 0o4711, 0o2755, 0o1777][self.rng.index(5)]);
            }
            1 => {
                let owner = (u32::try_from(self.rng.below(3)).unwrap_or(0) * 1000, 5);
                let _ = target.chown(&path, owner.0, owner.1);
            }
            2 => {
                self.clock += 17;
                let _ = target.set_mtime(&path, (self.clock, 123_456_789));
            }
            3 if kind == NodeKind::File || kind == NodeKind::Directory => {
                let value = self.rng.bytes(20);
                let _ = target.set_xattr(&path, format!("user.{}", self.rng.below(3)).as_bytes(), &value);
            }
            4 if kind == NodeKind::File || kind == NodeKind::Directory => {
                let _ = target.remove_xattr(&path, format!("user.{}", self.rng.below(3)).as_bytes());
            }
            5 if kind == NodeKind::File => {
                let _ = target.set_xattr(&path, b"security.capability", &CAPABILITY);
            }
            6 => {
                self.clock += 13;
                let _ = target.set_atime(&path, (self.clock, 987_654_321));
            }
            7 | 8 if kind == NodeKind::File || kind == NodeKind::Directory => self.flags(target, &path),
            9 if kind != NodeKind::Symlink => {
                let name = b"system.posix_acl_access";
                let _ = match self.rng.one_in(3) {
                    true => target.remove_xattr(&path, name),
                    false => target.set_xattr(&path, name, &ACL),
                };
            }
            10 if kind == NodeKind::File => {
                let _ = target.remove_xattr(&path, b"security.capability");
            }
            _ if kind == NodeKind::Directory => {
                let _ = match self.rng.one_in(3) {
                    true => target.remove_xattr(&path, b"system.posix_acl_default"),
                    false => target.set_xattr(&path, b"system.posix_acl_default", &ACL),
                };
            }
            _ => {}
        }
    }

    /// Sets flags as chattr(1) does. Most settings clear +i and +a, which hinder later operations.
    fn flags(&mut self, target: &mut dyn Target, path: &[u8]) {
        const FLAGS: [u32; 12] = [
            0,
            0,
            0x4,         // compression
            0x8,         // synchronous updates
            0x10,        // immutable
            0x20,        // append only
            0x40,        // no dump
            0x80,        // no atime
            0x400,       // no compression
            0x40 | 0x80, // no dump, no atime
            0x1_0000,    // synchronous directory updates
            0x80_0000,   // no copy-on-write
        ];
        let _ = target.set_flags(path, FLAGS[self.rng.index(FLAGS.len())]);
    }
}

/// `u::rwx,u:7:rwx,g::r-x,m::rwx,o::r-x`, as the kernel stores it.
const ACL: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 7, 0, 7, 0, 0, 0, 4, 0, 5, 0, 255, 255, 255, 255, 16, 0, 7, 0,
    255, 255, 255, 255, 32, 0, 5, 0, 255, 255, 255, 255,
];
