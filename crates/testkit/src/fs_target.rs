//! The in-process engine as a [`Target`], and a walk of it that can be compared with a mounted tree.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context, Result};
use rustix::io::Errno as Sys;
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::{FileType, Timespec};
use ubtrfs_fs::{
    Attr, Caller, FallocateMode, Fs, InodeId, MountOptions, NewInode, RenameFlags, SeekWhence, SetAttr, SetTime,
    XattrFlags, mode, rdev_from_parts, rdev_parts,
};

use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
use crate::tree_entry::{CHUNK_BYTES, ContentHash, TreeEntry, join, set_link_groups, show, xxh64};

/// An open filesystem under test. All operations run as root.
#[derive(Clone, Debug)]
pub struct FsTarget {
    fs: Arc<Fs>,
}

impl FsTarget {
    /// Opens an image file with these `-o` options.
    pub fn open(image: &std::path::Path, options: &str) -> Result<Self> {
        let options = MountOptions::parse(options)?;
        let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let device: Arc<dyn Device> =
            Arc::new(FileDevice::open(image, access).map_err(|error| anyhow::anyhow!("{error}"))?);
        Self::on_device(device, options)
    }

    /// Opens the filesystem on a device.
    pub fn on_device(device: Arc<dyn Device>, options: MountOptions) -> Result<Self> {
        Self::on_devices(vec![device], options)
    }

    /// Opens the filesystem on these devices of an array.
    pub fn on_devices(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Self> {
        Ok(Self { fs: Fs::open(devices, options)? })
    }

    /// The filesystem.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// Looks up the inode at a path. A symlink at the end of the path is not followed.
    pub fn lookup(&self, path: &[u8]) -> Result<Attr, Errno> {
        let mut attr = self.fs.getattr(self.fs.root()).map_err(number)?;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            if !attr.is_dir() {
                return Err(Sys::NOTDIR.raw_os_error());
            }
            attr = self.fs.lookup(attr.id, name).map_err(number)?;
        }
        Ok(attr)
    }

    /// Returns everything below the root.
    pub fn walk(&self) -> Result<Vec<TreeEntry>> {
        walk_fs(&self.fs)
    }

    /// Makes files of a walk longer, and checks that the added bytes are zeros: no old content may lie past the end of a
    /// file. Files that cannot be changed, and those for which there is no space, are left out.
    pub fn grow_files(&self, found: &[TreeEntry]) -> Result<()> {
        for entry in found.iter().filter(|entry| entry.kind == NodeKind::File).take(FILES_GROWN) {
            let size = entry.size.saturating_add(GROWN_BYTES);
            if self.set(&entry.path, SetAttr { size: Some(size), ..SetAttr::default() }).is_err() {
                continue;
            }
            let id = self.id(&entry.path).map_err(|errno| anyhow::anyhow!("errno {errno}"))?;
            let added = self.fs.read(id, entry.size, usize::try_from(GROWN_BYTES)?)?;
            let is_zero = added.len() as u64 == GROWN_BYTES && added.iter().all(|&byte| byte == 0);
            anyhow::ensure!(is_zero, "{}: old content past the end at {}", show(&entry.path), entry.size);
        }
        Ok(())
    }

    /// Commits and closes.
    pub fn close(self) -> Result<()> {
        Ok(self.fs.close()?)
    }

    fn id(&self, path: &[u8]) -> Result<InodeId, Errno> {
        Ok(self.lookup(path)?.id)
    }

    fn parent<'p>(&self, path: &'p [u8]) -> Result<(InodeId, &'p [u8]), Errno> {
        let (dir, name) = match path.iter().rposition(|&byte| byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&path[..0], path),
        };
        let attr = self.lookup(dir)?;
        if attr.is_dir() { Ok((attr.id, name)) } else { Err(Sys::NOTDIR.raw_os_error()) }
    }

    fn set(&self, path: &[u8], set: SetAttr) -> Result<(), Errno> {
        self.fs.setattr(self.id(path)?, &set, &Caller::ROOT).map(drop).map_err(number)
    }
}

/// Most files that [`FsTarget::grow_files`] makes longer, and by how much.
const FILES_GROWN: usize = 40;
const GROWN_BYTES: u64 = 300_000;

impl Target for FsTarget {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        let (dir, name) = self.parent(path)?;
        let type_bits = match kind {
            NodeKind::File => mode::REGULAR,
            NodeKind::Directory => mode::DIRECTORY,
            NodeKind::Symlink => mode::SYMLINK,
            NodeKind::Fifo => mode::FIFO,
            NodeKind::Socket => mode::SOCKET,
            NodeKind::CharDevice => mode::CHAR,
            NodeKind::BlockDevice => mode::BLOCK,
        };
        let new = NewInode {
            mode: type_bits | mode,
            rdev: rdev_from_parts(rdev.0, rdev.1),
            symlink_target: None,
            ..NewInode::default()
        };
        self.fs.create(dir, name, new, &Caller::ROOT).map(drop).map_err(number)
    }

    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        let (dir, name) = self.parent(path)?;
        self.fs.create(dir, name, NewInode::symlink(content), &Caller::ROOT).map(drop).map_err(number)
    }

    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        let id = self.id(old)?;
        let (dir, name) = self.parent(new)?;
        self.fs.link(id, dir, name).map(drop).map_err(number)
    }

    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        let (dir, name) = self.parent(path)?;
        self.fs.unlink(dir, name).map_err(number)
    }

    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        let (dir, name) = self.parent(path)?;
        self.fs.rmdir(dir, name).map_err(number)
    }

    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        let (dir, name) = self.parent(old)?;
        let (new_dir, new_name) = self.parent(new)?;
        let flags = match op {
            RenameOp::Replace => RenameFlags::empty(),
            RenameOp::NoReplace => RenameFlags::NOREPLACE,
            RenameOp::Exchange => RenameFlags::EXCHANGE,
        };
        self.fs.rename(dir, name, new_dir, new_name, flags).map_err(number)
    }

    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        let id = self.id(path)?;
        let mut done = 0;
        while done < data.len() {
            match self.fs.write(id, offset + done as u64, &data[done..]).map_err(number)? {
                0 => return Err(Sys::IO.raw_os_error()),
                more => done += more,
            }
        }
        Ok(())
    }

    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.fs.read(self.id(path)?, offset, len).map_err(number)
    }

    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        self.set(path, SetAttr { size: Some(len_bytes), ..SetAttr::default() })
    }

    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        let mode = match op {
            FallocateOp::Allocate => FallocateMode::empty(),
            FallocateOp::KeepSize => FallocateMode::KEEP_SIZE,
            FallocateOp::PunchHole => FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE,
            FallocateOp::ZeroRange => FallocateMode::ZERO_RANGE,
        };
        self.fs.fallocate(self.id(path)?, offset, len_bytes, mode).map_err(number)
    }

    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        let (source, sink) = (self.id(from)?, self.id(to)?);
        let mut done = 0;
        while done < len_bytes {
            let more =
                self.fs.copy_range(source, from_at + done, sink, to_at + done, len_bytes - done).map_err(number)?;
            if more == 0 {
                break;
            }
            done += more;
        }
        Ok(())
    }

    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        self.set(path, SetAttr { mode: Some(mode), ..SetAttr::default() })
    }

    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        self.set(path, SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() })
    }

    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno> {
        let at = SetTime::At(Timespec { sec: mtime.0, nsec: mtime.1 });
        self.set(path, SetAttr { mtime: Some(at), ..SetAttr::default() })
    }

    fn set_atime(&mut self, path: &[u8], atime: (i64, u32)) -> Result<(), Errno> {
        let at = SetTime::At(Timespec { sec: atime.0, nsec: atime.1 });
        self.set(path, SetAttr { atime: Some(at), ..SetAttr::default() })
    }

    fn set_flags(&mut self, path: &[u8], flags: u32) -> Result<(), Errno> {
        self.fs.set_inode_flags(self.id(path)?, flags, &Caller::ROOT).map_err(|error| error.errno())
    }

    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.fs.setxattr(self.id(path)?, name, value, XattrFlags::empty(), &Caller::ROOT).map_err(number)
    }

    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        self.fs.removexattr(self.id(path)?, name, &Caller::ROOT).map_err(number)
    }

    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.fs.fsync(self.id(path)?, false).map_err(number)
    }

    fn sync(&mut self) -> Result<(), Errno> {
        self.fs.sync().map_err(number)
    }
}

/// Returns everything below the root of an open filesystem, in the form that
/// [`walk_path`](crate::walk_path) has for a mounted filesystem.
pub fn walk_fs(fs: &Fs) -> Result<Vec<TreeEntry>> {
    walk_fs_from(fs, fs.root())
}

/// Returns everything below a directory, like [`walk_fs`].
pub fn walk_fs_from(fs: &Fs, dir: InodeId) -> Result<Vec<TreeEntry>> {
    let mut entries = Vec::new();
    let mut identities: HashMap<InodeId, Vec<usize>> = HashMap::new();
    let mut stack = vec![(Vec::new(), dir)];
    while let Some((path, id)) = stack.pop() {
        let attr = fs.getattr(id).with_context(|| format!("getattr {}", show(&path)))?;
        if attr.is_dir() {
            let mut children = Vec::new();
            list(fs, id, &mut |name, child| children.push((join(&path, name), child)))
                .with_context(|| format!("readdir {}", show(&path)))?;
            for (child_path, child) in &children {
                let name = child_path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
                let found = fs.lookup(id, name).with_context(|| format!("lookup {}", show(child_path)))?;
                anyhow::ensure!(found.id == *child, "{}: readdir and lookup name two inodes", show(child_path));
            }
            stack.append(&mut children);
        } else if attr.nlink > 1 {
            identities.entry(id).or_default().push(entries.len());
        }
        entries.push(entry_of(fs, path.clone(), &attr).with_context(|| format!("read {}", show(&path)))?);
    }
    set_link_groups(&mut entries, identities.into_values());
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}

fn list(fs: &Fs, dir: InodeId, found: &mut dyn FnMut(&[u8], InodeId)) -> Result<()> {
    let mut cookie = 0;
    loop {
        // Read few entries at a time, to test continuing from a cookie as well.
        let (start, mut taken) = (cookie, 0);
        fs.readdir(dir, cookie, &mut |entry| {
            if taken == 500 {
                return false;
            }
            taken += 1;
            cookie = entry.next_cookie;
            if entry.name != b"." && entry.name != b".." {
                found(entry.name, entry.id);
            }
            true
        })?;
        if taken < 500 {
            return Ok(());
        }
        anyhow::ensure!(cookie != start, "readdir does not move on");
    }
}

fn entry_of(fs: &Fs, path: Vec<u8>, attr: &Attr) -> Result<TreeEntry> {
    let kind = match attr.file_type().context("the mode has no valid type")? {
        FileType::Regular => NodeKind::File,
        FileType::Directory => NodeKind::Directory,
        FileType::Symlink => NodeKind::Symlink,
        FileType::Fifo => NodeKind::Fifo,
        FileType::Socket => NodeKind::Socket,
        FileType::CharDevice => NodeKind::CharDevice,
        FileType::BlockDevice => NodeKind::BlockDevice,
        other => anyhow::bail!("no such type of inode: {other:?}"),
    };
    let content = match kind {
        NodeKind::File => digest(fs, attr)?,
        NodeKind::Symlink => xxh64(&fs.readlink(attr.id)?),
        _ => 0,
    };
    let mut xattrs = BTreeMap::new();
    for name in fs.listxattr(attr.id)? {
        let value = fs.getxattr(attr.id, &name).with_context(|| format!("getxattr {}", show(&name)))?;
        xattrs.insert(name, value);
    }
    Ok(TreeEntry {
        path,
        kind,
        mode: attr.mode & mode::PERMISSIONS,
        uid: attr.uid,
        gid: attr.gid,
        size: attr.size,
        nlink: attr.nlink.into(),
        link_group: None,
        rdev: rdev_parts(attr.rdev),
        mtime: if attr.id.stub_of().is_some() { (0, 0) } else { (attr.mtime.sec, attr.mtime.nsec) },
        content,
        xattrs,
    })
}

fn digest(fs: &Fs, attr: &Attr) -> Result<u64> {
    let mut hash = ContentHash::new(attr.size);
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < attr.size {
        match fs.seek(attr.id, at, SeekWhence::Data) {
            Ok(data) => {
                anyhow::ensure!(data >= at, "SEEK_DATA from {at} went back to {data}");
                at = data - data % CHUNK_BYTES as u64;
            }
            Err(error) if error.errno() == Sys::NXIO.raw_os_error() => break,
            Err(error) => return Err(error).context("SEEK_DATA"),
        }
        let len = usize::try_from((attr.size - at).min(CHUNK_BYTES as u64))?;
        let read = fs.read_into(attr.id, at, &mut chunk[..len]).with_context(|| format!("read at {at}"))?;
        anyhow::ensure!(read == len, "read {read} bytes at {at}, expected {len}");
        hash.chunk(at / CHUNK_BYTES as u64, &chunk[..len]);
        at += CHUNK_BYTES as u64;
    }
    Ok(hash.finish())
}

/// Returns the errno of a call that must fail.
///
/// # Panics
/// If the call succeeded.
pub fn errno<T: std::fmt::Debug>(result: ubtrfs_fs::Result<T>) -> rustix::io::Errno {
    let error = result.expect_err("the call must fail");
    rustix::io::Errno::from_raw_os_error(error.errno())
}

#[allow(clippy::needless_pass_by_value, reason = "the shape that map_err takes")]
fn number(error: ubtrfs_fs::Error) -> Errno {
    error.errno()
}
