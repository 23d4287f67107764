//! Permissions on subvolumes; `fs` makes the changes. Extended attributes and ioctls both end here.
//!
//! | operation                | needs                                                                                    |
//! |--------------------------|------------------------------------------------------------------------------------------|
//! | create                   | write and search of the directory                                                        |
//! | snapshot                 | write and search of the directory, and ownership of the source's root directory          |
//! | delete                   | `user_subvol_rm_allowed`, write and search of the directory and of the subvolume's root directory, the rule of unlink for sticky directories, and that the subvolume is not read-only |
//! | delete, as the mount's owner | write and search of the directory, ownership of the subvolume's root directory, the rule of unlink for sticky directories |
//! | make read-only or writable | ownership of the subvolume's root directory                                            |
//! | set the default, list all | ownership of the mount                                                                  |
//!
//! rmdir also removes an empty subvolume, and needs the rights that it needs for any directory.
//!
//! - U1. Root may do everything. Only root and the mount's owner see the paths of all subvolumes; other users see the
//!   path of the subvolume that they are in.

use std::sync::Arc;

use ubtrfs_format::RootId;
use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{Caller, Error, Fs, InodeId, Result, SubvolumeInfo};

use crate::access::may_change_names;
use crate::caller::Groups;
use crate::name_cache::NameCache;
use crate::node::Nodes;
use crate::protocol::Request;
use crate::subvolume_control::{
    CREATE_XATTR, DEFAULT_XATTR, DELETE_XATTR, LIST_PREFIX, PAGE_LEN, READ_ONLY_XATTR, SETTLED_XATTR, SNAPSHOT_XATTR,
    SUBVOLUME_XATTR, encode, parse_create, parse_id, parse_snapshot,
};
use crate::transport::Place;

/// The subvolumes of a mount.
#[derive(Debug)]
pub(crate) struct Subvolumes {
    fs: Arc<Fs>,
    groups: Groups,
    names: NameCache,
    pub(crate) nodes: Arc<Nodes>,
    /// The user who mounted.
    owner: u32,
}

impl Subvolumes {
    /// The mount's owner is the user of this process now, even if confinement changes it later.
    pub(crate) fn new(fs: Arc<Fs>, groups: Groups, names: NameCache) -> Self {
        let nodes = Arc::new(Nodes::new(fs.root()));
        Self { fs, groups, names, nodes, owner: rustix::process::getuid().as_raw() }
    }

    /// The value of a virtual attribute about subvolumes; `None` for any other attribute.
    pub(crate) fn getxattr(
        &self,
        req: &Request<'_>,
        id: InodeId,
        name: &[u8],
        place: &Place<'_>,
    ) -> Option<Result<Vec<u8>>> {
        match std::str::from_utf8(name).ok()? {
            SUBVOLUME_XATTR => Some(self.describe(id)),
            DEFAULT_XATTR => Some(self.fs.default_subvolume().map(|id| id.0.to_string().into_bytes())),
            SETTLED_XATTR => {
                // If no thread is free, the kernel learns of the names later.
                let _ = place.aside_for_kernel(|| self.names.settle());
                Some(Ok(b"ok".to_vec()))
            }
            name => {
                let from = parse_id(name.strip_prefix(LIST_PREFIX)?.as_bytes())?;
                Some(place.aside(|| self.page(req, from)))
            }
        }
    }

    /// Does the operation that setting a virtual attribute stands for; `None` for any other attribute.
    pub(crate) fn setxattr(
        &self,
        req: &Request<'_>,
        id: InodeId,
        name: &[u8],
        value: &[u8],
        place: &Place<'_>,
    ) -> Option<Result<()>> {
        let garbled = Error::InvalidArgument("the value of the attribute");
        let work: Box<dyn FnOnce() -> Result<()> + '_> = match std::str::from_utf8(name).ok()? {
            CREATE_XATTR => Box::new(move || {
                let (umask, name) = parse_create(value).ok_or(garbled)?;
                self.create(req, id, name, Some(umask))
            }),
            SNAPSHOT_XATTR => Box::new(move || {
                let (source, read_only, name) = parse_snapshot(value).ok_or(garbled)?;
                self.snapshot(req, id, source, read_only, name)
            }),
            DELETE_XATTR => Box::new(move || self.delete(req, id, value)),
            READ_ONLY_XATTR => Box::new(move || match value {
                b"0" => self.set_read_only(req, id, false),
                b"1" => self.set_read_only(req, id, true),
                _ => Err(garbled),
            }),
            DEFAULT_XATTR if value.is_empty() => Box::new(move || self.set_default(req, root_of(id)?)),
            DEFAULT_XATTR => Box::new(move || self.set_default(req, parse_id(value).ok_or(garbled)?)),
            SUBVOLUME_XATTR | SETTLED_XATTR => Box::new(|| Err(Error::NotPermitted("the attribute is only read"))),
            _ => return None,
        };
        Some(place.aside(work))
    }

    /// Makes a subvolume with the caller's umask, which is looked up if it is not given.
    pub(crate) fn create(&self, req: &Request<'_>, dir: InodeId, name: &[u8], umask: Option<u32>) -> Result<()> {
        check_name(name)?;
        let umask = umask.unwrap_or_else(|| self.groups.umask(req));
        may_change_names(&self.fs, &self.groups, req, dir)?;
        self.fs.create_subvolume(dir, name, &Caller { uid: req.uid, gid: req.gid, umask })?;
        self.names.forget(req.node, name);
        Ok(())
    }

    fn snapshot(&self, req: &Request<'_>, dir: InodeId, source: RootId, read_only: bool, name: &[u8]) -> Result<()> {
        check_name(name)?;
        may_change_names(&self.fs, &self.groups, req, dir)?;
        self.check_owner(req, source)?;
        self.fs.snapshot(source, dir, name, read_only)?;
        self.names.forget(req.node, name);
        Ok(())
    }

    pub(crate) fn delete(&self, req: &Request<'_>, dir: InodeId, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let found = self.fs.lookup(dir, name)?;
        self.fs.forget(found.id, 1);
        let is_allowed = self.fs.options().user_subvol_rm_allowed;
        let is_mounter = req.uid == self.owner;
        if req.uid != 0 && !is_allowed && !is_mounter {
            return Err(Error::NotPermitted("without the mount option user_subvol_rm_allowed"));
        }
        if !found.is_dir() && req.uid == 0 {
            return Err(Error::NotDirectory);
        }
        let victim = root_of(found.id)?;
        if is_mounter {
            self.check_owner(req, victim)?;
        } else if req.uid != 0 {
            may_change_names(&self.fs, &self.groups, req, found.id)?;
            self.fs.check_writable(found.id)?;
        }
        let parent = may_change_names(&self.fs, &self.groups, req, dir)?;
        let is_sticky = parent.mode & STICKY != 0;
        if is_sticky && ![0, parent.uid, found.uid].contains(&req.uid) {
            return Err(Error::NotPermitted("the directory is sticky"));
        }
        self.fs.delete_subvolume(dir, name, Some(victim))?;
        // By then the filesystem may be closed.
        let (fs, nodes) = (Arc::downgrade(&self.fs), Arc::clone(&self.nodes));
        self.names.forget_with(req.node, name, move || {
            let used = fs.upgrade().map(|fs| fs.used_names_of_deleted(victim)).unwrap_or_default();
            used.into_iter().map(|(dir, name)| (nodes.node(dir), name)).collect()
        });
        Ok(())
    }

    pub(crate) fn set_read_only(&self, req: &Request<'_>, id: InodeId, read_only: bool) -> Result<()> {
        if req.uid != 0 && self.fs.getattr(id)?.uid != req.uid {
            return Err(Error::NotPermitted("it is somebody else's"));
        }
        self.fs.set_subvolume_read_only(root_of(id)?, read_only)
    }

    pub(crate) fn set_default(&self, req: &Request<'_>, id: RootId) -> Result<()> {
        self.check_mount_owner(req)?;
        self.fs.set_default_subvolume(id)
    }

    /// The subvolume that contains an inode.
    pub(crate) fn info(&self, id: InodeId) -> Result<SubvolumeInfo> {
        self.fs.subvolume_info(id.root)
    }

    /// See [`NameCache::settle`].
    pub(crate) fn settle(&self) {
        self.names.settle();
    }

    fn describe(&self, id: InodeId) -> Result<Vec<u8>> {
        let is_root = if root_of(id).is_ok() { b"1 " } else { b"0 " };
        Ok([&is_root[..], &encode(&self.info(id)?)].concat())
    }

    /// Records of the subvolumes from this id on, as many as fit into a page; at least one if there is any.
    fn page(&self, req: &Request<'_>, from: RootId) -> Result<Vec<u8>> {
        self.check_mount_owner(req)?;
        let mut page = Vec::new();
        for info in self.fs.subvolumes()?.iter().filter(|info| info.id >= from) {
            let record = encode(info);
            if page.len() + record.len() > PAGE_LEN {
                if page.is_empty() {
                    return Err(Error::TooBig);
                }
                break;
            }
            page.extend(record);
        }
        Ok(page)
    }

    fn check_owner(&self, req: &Request<'_>, subvolume: RootId) -> Result<()> {
        if req.uid == 0 || self.fs.getattr(InodeId::root_of(subvolume))?.uid == req.uid {
            return Ok(());
        }
        Err(Error::NotPermitted("the subvolume's root directory is somebody else's"))
    }

    /// U1
    fn check_mount_owner(&self, req: &Request<'_>) -> Result<()> {
        if req.uid == 0 || req.uid == self.owner {
            return Ok(());
        }
        Err(Error::NotPermitted("somebody else mounted it"))
    }
}

/// The subvolume whose root directory an inode is.
pub(crate) fn root_of(id: InodeId) -> Result<RootId> {
    if id == InodeId::root_of(id.root) { Ok(id.root) } else { Err(Error::InvalidArgument("not a subvolume")) }
}

/// Whether a subvolume is read-only.
pub(crate) fn is_read_only(info: &SubvolumeInfo) -> bool {
    info.flags.contains(RootFlags::RDONLY)
}

fn check_name(name: &[u8]) -> Result<()> {
    match name {
        b"" | b"." | b".." => Err(Error::InvalidArgument("a subvolume's name")),
        name if name.len() > NAME_MAX => Err(Error::NameTooLong),
        name if name.iter().any(|byte| matches!(byte, b'/' | 0)) => Err(Error::InvalidArgument("a subvolume's name")),
        _ => Ok(()),
    }
}

const NAME_MAX: usize = 255;
const STICKY: u32 = 0o1000;

/// A subvolume for tests, with a different value in each field.
#[cfg(test)]
pub(crate) fn example() -> SubvolumeInfo {
    use ubtrfs_format::item::Timespec;
    use ubtrfs_format::{Generation, Ino};

    SubvolumeInfo {
        id: RootId(300),
        path: b"dir/name".to_vec(),
        parent: Some(RootId(5)),
        dirid: Ino(257),
        flags: RootFlags::RDONLY,
        uuid: "01010101-0101-0101-0101-010101010101".parse().unwrap_or_default(),
        parent_uuid: Default::default(),
        received_uuid: Default::default(),
        generation: Generation(9),
        otransid: Generation(7),
        ctransid: Generation(8),
        stransid: Generation(6),
        rtransid: Generation(5),
        otime: Timespec { sec: 11, nsec: 12 },
        ctime: Timespec { sec: 13, nsec: 14 },
        stime: Timespec { sec: -15, nsec: 16 },
        rtime: Timespec { sec: 17, nsec: 18 },
    }
}
