//! The filesystem object.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::RootId;

use crate::{
    Attr, Caller, DirEntryOut, Error, InodeId, MountOptions, NewInode, RenameFlags, Result, SetAttr, StatFs,
    SubvolumeInfo, XattrFlags,
};

/// An open filesystem.
#[derive(Debug)]
pub struct Fs {}

const SOON: Error = Error::NotSupported("not yet");

#[allow(missing_docs, unused_variables)]
impl Fs {
    /// Opens the filesystem on these devices.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Arc<Self>> {
        Err(SOON)
    }
    /// Why it takes no changes, if it does not.
    pub fn read_only(&self) -> Option<String> {
        None
    }
    pub fn options(&self) -> &MountOptions {
        unreachable!()
    }
    pub fn superblock(&self) -> ubtrfs_format::superblock::Superblock {
        unreachable!()
    }
    /// The directory that is shown as the root: `subvol=`, `subvolid=` or the default subvolume.
    pub fn root(&self) -> InodeId {
        InodeId::root_of(RootId::FS_TREE)
    }
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Attr> {
        Err(SOON)
    }
    pub fn lookup_path(&self, path: &[u8], follow: bool) -> Result<Attr> {
        Err(SOON)
    }
    pub fn getattr(&self, id: InodeId) -> Result<Attr> {
        Err(SOON)
    }
    pub fn setattr(&self, id: InodeId, set: &SetAttr, caller: &Caller) -> Result<Attr> {
        Err(SOON)
    }
    pub fn create(&self, dir: InodeId, name: &[u8], new: NewInode<'_>, caller: &Caller) -> Result<Attr> {
        Err(SOON)
    }
    /// A regular file without a name; it is open, [`Fs::release_inode`] ends that.
    pub fn tmpfile(&self, dir: InodeId, mode: u32, caller: &Caller) -> Result<Attr> {
        Err(SOON)
    }
    pub fn link(&self, id: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
        Err(SOON)
    }
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        Err(SOON)
    }
    pub fn rmdir(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        Err(SOON)
    }
    pub fn rename(
        &self,
        dir: InodeId,
        name: &[u8],
        new_dir: InodeId,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Result<()> {
        Err(SOON)
    }
    pub fn readlink(&self, id: InodeId) -> Result<Vec<u8>> {
        Err(SOON)
    }
    /// Hands out the entries after `cookie` (0: from the start) until `emit` returns false (that entry was not taken).
    pub fn readdir(&self, dir: InodeId, cookie: u64, emit: &mut dyn FnMut(DirEntryOut<'_>) -> bool) -> Result<()> {
        Err(SOON)
    }
    pub fn parent(&self, dir: InodeId) -> Result<InodeId> {
        Err(SOON)
    }
    pub fn open_inode(&self, id: InodeId) -> Result<()> {
        Err(SOON)
    }
    pub fn release_inode(&self, id: InodeId) {}
    /// Gives back `n` references that lookups counted ([`MountOptions::track_lookups`]).
    pub fn forget(&self, id: InodeId, n: u64) {}
    pub fn getxattr(&self, id: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        Err(SOON)
    }
    pub fn setxattr(&self, id: InodeId, name: &[u8], value: &[u8], flags: XattrFlags, caller: &Caller) -> Result<()> {
        Err(SOON)
    }
    pub fn listxattr(&self, id: InodeId) -> Result<Vec<Vec<u8>>> {
        Err(SOON)
    }
    pub fn removexattr(&self, id: InodeId, name: &[u8], caller: &Caller) -> Result<()> {
        Err(SOON)
    }
    /// Flags of the inode as FS_IOC_GETFLAGS shows them.
    pub fn inode_flags(&self, id: InodeId) -> Result<u32> {
        Err(SOON)
    }
    pub fn set_inode_flags(&self, id: InodeId, flags: u32, caller: &Caller) -> Result<()> {
        Err(SOON)
    }
    /// Writes out everything and commits.
    pub fn sync(&self) -> Result<()> {
        Err(SOON)
    }
    pub fn statfs(&self) -> Result<StatFs> {
        Err(SOON)
    }
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        Err(SOON)
    }
    pub fn close(&self) -> Result<()> {
        Err(SOON)
    }
}
