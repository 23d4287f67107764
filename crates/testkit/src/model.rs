//! The reference model: a filesystem in memory that is too simple to be wrong.
//!
//! The model implements [`Target`], so an operation's result on the model predicts its result on the filesystem under
//! test. All operations run as root.
//!
//! I1. Every node except the root has at least one link, and every link names a directory that holds the node.
//! I2. All bytes of a file's blocks past the end of the file are zero. A missing block stands for zeros.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use rustix::io::Errno as Sys;

use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
use crate::tree_entry::{CHUNK_BYTES, ContentHash, TreeEntry, is_stub, join, set_link_groups, walk_path, xxh64};

const BLOCK: u64 = 4096;
pub(crate) const ROOT: u64 = 0;

/// Error of an operation on the model: an errno value.
pub type ModelError = Errno;

/// A value of `security.capability`: `cap_net_raw+ep`, as `setcap` stores it.
pub const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A filesystem in memory.
#[derive(Clone, Debug)]
pub struct Model {
    /// The nodes, shared with clones of the model, so that a clone after each step takes memory only for the nodes
    /// that the step changed.
    pub(crate) nodes: BTreeMap<u64, Arc<Node>>,
    next: u64,
    read_only_volumes: Vec<u64>,
}

/// A file, directory or other inode.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) kind: NodeKind,
    pub(crate) mode: u32,
    uid: u32,
    gid: u32,
    rdev: (u32, u32),
    pub(crate) size: u64,
    blocks: BTreeMap<u64, Arc<[u8]>>,
    symlink: Vec<u8>,
    /// Hash of the content, computed on demand.
    digest: OnceLock<u64>,
    pub(crate) children: BTreeMap<Vec<u8>, u64>,
    pub(crate) links: Vec<(u64, Vec<u8>)>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The node's subvolume. Renames and links cannot leave the subvolume.
    pub(crate) volume: u64,
    /// Whether the driver must not change the node.
    pub(crate) fixed: bool,
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

impl Model {
    /// Makes a model with an empty root directory.
    pub fn new() -> Self {
        let mut nodes = BTreeMap::new();
        nodes.insert(ROOT, Arc::new(Node::new(NodeKind::Directory, 0o755, 0)));
        Self { nodes, next: 1, read_only_volumes: Vec::new() }
    }

    /// Loads a directory of the running system. Different device numbers mean different subvolumes.
    pub fn load(root: &Path) -> Result<Self> {
        let mut model = Self { nodes: BTreeMap::new(), next: 0, read_only_volumes: Vec::new() };
        let mut groups: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        let mut by_path: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        for entry in walk_path(root)? {
            let full = root.join(std::ffi::OsStr::from_bytes(&entry.path));
            let known = entry.link_group.as_ref().and_then(|group| groups.get(group).copied());
            let id = match known {
                Some(id) => id,
                None => {
                    let id = model.next;
                    model.next += 1;
                    let node = load_node(&full, &entry).with_context(|| format!("load {}", full.display()))?;
                    model.nodes.insert(id, Arc::new(node));
                    if let Some(group) = &entry.link_group {
                        groups.insert(group.clone(), id);
                    }
                    id
                }
            };
            if !entry.path.is_empty() {
                let (dir, name) = split(&entry.path);
                // The entries are sorted, so a directory comes before its children.
                let parent = *by_path.get(dir).context("I1: the parent was walked before")?;
                model.add_link(parent, name, id);
            }
            by_path.insert(entry.path, id);
        }
        Ok(model)
    }

    /// Makes the subvolume that holds this path read-only.
    pub fn set_read_only(&mut self, path: &[u8]) -> Result<(), ModelError> {
        let volume = self.nodes[&self.find(path)?].volume;
        self.read_only_volumes.push(volume);
        Ok(())
    }

    /// Forbids the driver to change the node at this path and everything below it.
    pub fn fix(&mut self, path: &[u8]) -> Result<(), ModelError> {
        let mut stack = vec![self.find(path)?];
        while let Some(id) = stack.pop() {
            let node = Arc::make_mut(self.nodes.get_mut(&id).ok_or_else(|| errno(Sys::NOENT))?);
            node.fixed = true;
            stack.extend(node.children.values().copied());
        }
        Ok(())
    }

    /// The number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether only the root exists.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() <= 1
    }

    /// Returns everything that a walk of the filesystem must find. All times and the sizes of directories are 0,
    /// because the model does not have them.
    pub fn entries(&self) -> Vec<TreeEntry> {
        self.entries_and_ids().into_iter().map(|(entry, _)| entry).collect()
    }

    /// Returns the entries of [`Model::entries`], each with its node's number.
    pub(crate) fn entries_and_ids(&self) -> Vec<(TreeEntry, u64)> {
        let mut ids = Vec::new();
        let mut entries = Vec::new();
        let mut identities: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let mut stack = vec![(Vec::new(), ROOT)];
        while let Some((path, id)) = stack.pop() {
            let node = &self.nodes[&id];
            stack.extend(node.children.iter().map(|(name, child)| (join(&path, name), *child)));
            let content = *node.digest.get_or_init(|| node.hash());
            ids.push(id);
            if node.links.len() > 1 {
                identities.entry(id).or_default().push(entries.len());
            }
            entries.push(TreeEntry {
                path,
                kind: node.kind,
                mode: node.mode,
                uid: node.uid,
                gid: node.gid,
                size: node.size,
                nlink: node.links.len().max(1) as u64,
                link_group: None,
                rdev: node.rdev,
                mtime: (0, 0),
                content,
                xattrs: node.xattrs.clone(),
            });
        }
        set_link_groups(&mut entries, identities.into_values());
        let mut entries: Vec<(TreeEntry, u64)> = entries.into_iter().zip(ids).collect();
        entries.sort_by(|(a, _), (b, _)| a.path.cmp(&b.path));
        entries
    }

    /// Returns a path that leads to the node `id` through the node's `choice`-th link.
    pub(crate) fn path_of(&self, id: u64, choice: usize) -> Vec<u8> {
        let mut names = Vec::new();
        let (mut at, mut choice) = (id, choice);
        while at != ROOT {
            let links = &self.nodes[&at].links;
            let (parent, name) = &links[choice % links.len()];
            names.push(name.clone());
            (at, choice) = (*parent, 0);
        }
        names.reverse();
        names.join(&b'/')
    }

    /// Whether `id` is `ancestor` or below it.
    pub(crate) fn is_below(&self, id: u64, ancestor: u64) -> bool {
        let mut at = id;
        loop {
            if at == ancestor {
                return true;
            }
            match self.nodes[&at].links.first() {
                Some((parent, _)) => at = *parent,
                None => return false,
            }
        }
    }

    pub(crate) fn find(&self, path: &[u8]) -> Result<u64, Errno> {
        let mut at = ROOT;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let node = &self.nodes[&at];
            if node.kind != NodeKind::Directory {
                return Err(errno(Sys::NOTDIR));
            }
            if name.len() > 255 {
                return Err(errno(Sys::NAMETOOLONG));
            }
            at = *node.children.get(name).ok_or_else(|| errno(Sys::NOENT))?;
        }
        Ok(at)
    }

    /// Returns the directory of a path, and the last name in the path. Unless `replace` is set, the name must not
    /// exist. Whether the directory is writable is not checked here: as Linux does, callers check it after this lookup
    /// ([`Model::writable`]).
    fn find_parent<'p>(&self, path: &'p [u8], replace: bool) -> Result<(u64, &'p [u8]), Errno> {
        let (dir, name) = split(path);
        let parent = self.find(dir)?;
        let node = &self.nodes[&parent];
        if node.kind != NodeKind::Directory {
            return Err(errno(Sys::NOTDIR));
        }
        if name.len() > 255 {
            return Err(errno(Sys::NAMETOOLONG));
        }
        if !replace && node.children.contains_key(name) {
            return Err(errno(Sys::EXIST));
        }
        Ok((parent, name))
    }

    fn writable(&self, id: u64) -> Result<(), Errno> {
        if self.read_only_volumes.contains(&self.nodes[&id].volume) { Err(errno(Sys::ROFS)) } else { Ok(()) }
    }

    fn change(&mut self, path: &[u8]) -> Result<&mut Node, Errno> {
        let id = self.find(path)?;
        self.writable(id)?;
        Ok(self.node(id))
    }

    fn change_file(&mut self, path: &[u8]) -> Result<&mut Node, Errno> {
        let id = self.find(path)?;
        match self.nodes[&id].kind {
            NodeKind::File => {}
            NodeKind::Directory => return Err(errno(Sys::ISDIR)),
            _ => return Err(errno(Sys::INVAL)),
        }
        self.writable(id)?;
        Ok(self.node(id))
    }

    fn node(&mut self, id: u64) -> &mut Node {
        // The digest is reset, because callers may change the content.
        let node = Arc::make_mut(self.nodes.get_mut(&id).expect("I1: links name nodes that exist"));
        node.digest = OnceLock::new();
        node
    }

    fn insert(&mut self, path: &[u8], mut node: Node) -> Result<(), Errno> {
        let (parent, name) = self.find_parent(path, false)?;
        self.writable(parent)?;
        let dir = &self.nodes[&parent];
        node.volume = dir.volume;
        if dir.mode & 0o2000 != 0 {
            node.gid = dir.gid;
            if node.kind == NodeKind::Directory {
                node.mode |= 0o2000;
            }
        }
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Arc::new(node));
        self.add_link(parent, name, id);
        Ok(())
    }

    fn add_link(&mut self, parent: u64, name: &[u8], id: u64) {
        self.node(parent).children.insert(name.to_vec(), id);
        self.node(id).links.push((parent, name.to_vec()));
    }

    fn remove_link(&mut self, parent: u64, name: &[u8]) {
        let id = self.node(parent).children.remove(name).expect("I1: the caller found the name");
        let links = &mut self.node(id).links;
        links.retain(|(dir, link)| (*dir, link.as_slice()) != (parent, name));
        if links.is_empty() {
            self.nodes.remove(&id);
        }
    }
}

impl Target for Model {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        let mut node = Node::new(kind, mode, 0);
        node.rdev = rdev;
        self.insert(path, node)
    }

    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        let mut node = Node::new(NodeKind::Symlink, 0o777, 0);
        node.symlink = content.to_vec();
        node.size = content.len() as u64;
        self.insert(path, node)
    }

    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        let id = self.find(old)?;
        let (parent, name) = self.find_parent(new, false)?;
        self.writable(parent)?;
        if self.nodes[&id].kind == NodeKind::Directory {
            return Err(errno(Sys::PERM));
        }
        if self.nodes[&id].volume != self.nodes[&parent].volume {
            return Err(errno(Sys::XDEV));
        }
        self.add_link(parent, name, id);
        Ok(())
    }

    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        let id = self.find(path)?;
        let (parent, name) = self.find_parent(path, true)?;
        self.writable(parent)?;
        if self.nodes[&id].kind == NodeKind::Directory {
            return Err(errno(Sys::ISDIR));
        }
        self.remove_link(parent, name);
        Ok(())
    }

    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        let id = self.find(path)?;
        let (parent, name) = self.find_parent(path, true)?;
        self.writable(parent)?;
        let node = &self.nodes[&id];
        if node.kind != NodeKind::Directory {
            return Err(errno(Sys::NOTDIR));
        }
        if !node.children.is_empty() {
            return Err(errno(Sys::NOTEMPTY));
        }
        self.remove_link(parent, name);
        Ok(())
    }

    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        let id = self.find(old)?;
        let (old_parent, old_name) = self.find_parent(old, true)?;
        let (new_parent, new_name) = self.find_parent(new, op != RenameOp::NoReplace)?;
        let there = self.nodes[&new_parent].children.get(new_name).copied();
        let directory = self.nodes[&id].kind == NodeKind::Directory;
        if op == RenameOp::Exchange && there.is_none() {
            return Err(errno(Sys::NOENT));
        }
        if directory && self.is_below(new_parent, id) {
            return Err(errno(Sys::INVAL));
        }
        if there.is_some_and(|other| self.is_below(old_parent, other)) {
            return Err(errno(if op == RenameOp::Exchange { Sys::INVAL } else { Sys::NOTEMPTY }));
        }
        if there == Some(id) {
            return Ok(());
        }
        self.writable(old_parent)?;
        self.writable(new_parent)?;
        if let Some(other) = there.filter(|_| op == RenameOp::Replace) {
            match (directory, self.nodes[&other].kind == NodeKind::Directory) {
                (true, false) => return Err(errno(Sys::NOTDIR)),
                (false, true) => return Err(errno(Sys::ISDIR)),
                _ => {}
            }
        }
        if self.nodes[&old_parent].volume != self.nodes[&new_parent].volume {
            return Err(errno(Sys::XDEV));
        }
        match there {
            Some(other) if op == RenameOp::Exchange => {
                self.detach(old_parent, old_name);
                self.detach(new_parent, new_name);
                self.add_link(new_parent, new_name, id);
                self.add_link(old_parent, old_name, other);
            }
            Some(other) if !self.nodes[&other].children.is_empty() => return Err(errno(Sys::NOTEMPTY)),
            there => {
                if there.is_some() {
                    self.remove_link(new_parent, new_name);
                }
                self.detach(old_parent, old_name);
                self.add_link(new_parent, new_name, id);
            }
        }
        Ok(())
    }

    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.change_file(path)?.write(offset, data);
        Ok(())
    }

    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        Ok(self.nodes[&self.find(path)?].read(offset, len))
    }

    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        let node = self.change_file(path)?;
        if len_bytes < node.size {
            node.zero(len_bytes, node.size);
        }
        node.size = len_bytes;
        Ok(())
    }

    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        let node = self.change_file(path)?;
        let end = offset + len_bytes;
        match op {
            FallocateOp::KeepSize => {}
            FallocateOp::Allocate => node.size = node.size.max(end),
            FallocateOp::PunchHole => node.zero(offset, end.min(node.size)),
            FallocateOp::ZeroRange => {
                node.zero(offset, end.min(node.size));
                node.size = node.size.max(end);
            }
        }
        Ok(())
    }

    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        let len = usize::try_from(len_bytes).map_err(|_| errno(Sys::INVAL))?;
        let data = self.nodes[&self.find(from)?].read(from_at, len);
        self.change_file(to)?.write(to_at, &data);
        Ok(())
    }

    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        self.change(path)?.mode = mode;
        Ok(())
    }

    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        let node = self.change(path)?;
        (node.uid, node.gid) = (uid, gid);
        Ok(())
    }

    fn set_mtime(&mut self, path: &[u8], _mtime: (i64, u32)) -> Result<(), Errno> {
        self.change(path).map(drop)
    }

    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.change(path)?.xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        self.change(path)?.xattrs.remove(name).map(drop).ok_or_else(|| errno(Sys::NODATA))
    }

    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.find(path).map(drop)
    }

    fn sync(&mut self) -> Result<(), Errno> {
        Ok(())
    }
}

impl Model {
    /// Removes a name, but keeps the node even if that name was the node's last one.
    fn detach(&mut self, parent: u64, name: &[u8]) {
        let id = self.node(parent).children.remove(name).expect("I1: the caller found the name");
        self.node(id).links.retain(|(dir, link)| (*dir, link.as_slice()) != (parent, name));
    }
}

impl Node {
    fn new(kind: NodeKind, mode: u32, volume: u64) -> Self {
        Self {
            kind,
            mode,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            size: 0,
            blocks: BTreeMap::new(),
            symlink: Vec::new(),
            digest: OnceLock::new(),
            children: BTreeMap::new(),
            links: Vec::new(),
            xattrs: BTreeMap::new(),
            volume,
            fixed: false,
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let within = (at % BLOCK) as usize;
            let len = rest.len().min(BLOCK as usize - within);
            let block = self.blocks.entry(at / BLOCK).or_insert_with(|| vec![0; BLOCK as usize].into());
            Arc::make_mut(block)[within..within + len].copy_from_slice(&rest[..len]);
            at += len as u64;
            rest = &rest[len..];
        }
        if !data.is_empty() {
            self.size = self.size.max(at);
        }
    }

    fn zero(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let (first, last) = (start / BLOCK, (end - 1) / BLOCK);
        let indexes: Vec<u64> = self.blocks.range(first..=last).map(|(index, _)| *index).collect();
        for index in indexes {
            let from = start.max(index * BLOCK) - index * BLOCK;
            let to = end.min((index + 1) * BLOCK) - index * BLOCK;
            if (from, to) == (0, BLOCK) {
                self.blocks.remove(&index);
            } else if let Some(block) = self.blocks.get_mut(&index) {
                Arc::make_mut(block)[from as usize..to as usize].fill(0);
            }
        }
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let end = self.size.min(offset.saturating_add(len as u64));
        if end <= offset {
            return Vec::new();
        }
        let mut out = vec![0; (end - offset) as usize];
        for (index, block) in self.blocks.range(offset / BLOCK..=(end - 1) / BLOCK) {
            let start = index * BLOCK;
            let (from, to) = (start.max(offset), (start + BLOCK).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&block[(from - start) as usize..(to - start) as usize]);
        }
        out
    }

    fn hash(&self) -> u64 {
        match self.kind {
            NodeKind::Symlink => xxh64(&self.symlink),
            NodeKind::File => {
                let per_chunk = CHUNK_BYTES as u64 / BLOCK;
                let mut hash = ContentHash::new(self.size);
                let mut last = None;
                for chunk in self.blocks.keys().map(|index| index / per_chunk) {
                    if last.replace(chunk) != Some(chunk) {
                        hash.chunk(chunk, &self.read(chunk * CHUNK_BYTES as u64, CHUNK_BYTES));
                    }
                }
                hash.finish()
            }
            _ => 0,
        }
    }
}

fn load_node(full: &Path, entry: &TreeEntry) -> Result<Node> {
    let meta = std::fs::symlink_metadata(full)?;
    let mut node = Node::new(entry.kind, entry.mode, meta.dev());
    (node.uid, node.gid, node.rdev) = (entry.uid, entry.gid, entry.rdev);
    node.xattrs = entry.xattrs.clone();
    node.fixed = is_stub(entry.kind, meta.ino());
    match entry.kind {
        NodeKind::File => {
            let file = std::fs::File::open(full)?;
            let mut block = vec![0; BLOCK as usize];
            let mut at = 0;
            while at < entry.size {
                match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
                    Ok(data) => at = data - data % BLOCK,
                    Err(Sys::NXIO) => break,
                    Err(_) => {} // The filesystem does not report holes, so read everything.
                }
                let len = (entry.size - at).min(BLOCK) as usize;
                file.read_exact_at(&mut block[..len], at)?;
                if block[..len].iter().any(|&byte| byte != 0) {
                    node.write(at, &block[..len]);
                }
                at += BLOCK;
            }
            node.size = entry.size;
        }
        NodeKind::Symlink => {
            node.symlink = std::fs::read_link(full)?.as_os_str().as_bytes().to_vec();
            node.size = entry.size;
        }
        _ => {}
    }
    Ok(node)
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

fn errno(error: Sys) -> Errno {
    error.raw_os_error()
}
