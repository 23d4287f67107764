//! Which mount's server has an image or device open as a device of its filesystem. The table of mounts does not decide: it
//! may name an image for several mounts, because a device may leave a filesystem and be mounted with another one, and it
//! goes on to name a seed for the filesystem that was made on it.

use std::path::{Path, PathBuf};

use ubtrfs_control::{Channel, Request, Response, filesystem};
use ubtrfs_device::find_members;
use ubtrfs_fuse::FirstMount;
use uuid::Uuid;

use super::device::superblock_of;
use super::place::await_server;

/// The servers that have a device open.
pub(crate) struct ServersOf {
    /// Their process ids.
    holders: Vec<u32>,
    /// The fsid of a seed. The servers of the filesystems on it have it open, too.
    seed: Option<Uuid>,
}

impl ServersOf {
    pub(crate) fn device(device: &Path) -> Self {
        // Nothing tells which server has an export open, and its NBD server may serve one client only.
        if ubtrfs_device::is_url(device) {
            return Self { holders: Vec::new(), seed: None };
        }
        let holders = ubtrfs_device::lock_holders(device);
        let seed = ubtrfs_device::is_seed(device).then(|| Some(superblock_of(device).ok()?.fsid)).flatten();
        Self { holders, seed }
    }

    /// Whether a process is known to have the device open. From another pid namespace, a lock shows no holder.
    pub(crate) fn are_known(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Whether a mount's server has the device open as a device of its own filesystem. Without known holders, any server
    /// may have it open.
    pub(crate) fn include(&self, channel: &Channel<'_>) -> bool {
        if self.are_known() && !channel.server().is_some_and(|server| self.holders.contains(&server)) {
            return false;
        }
        let Some(seed) = self.seed else { return true };
        let info = channel.call(Request::Filesystem(filesystem::Request::Info), &[]);
        matches!(info, Ok(Response::Filesystem(filesystem::Response::Info(info))) if info.fsid == seed)
    }
}

/// The mount whose server has this image or device open. Where no holder is known, the latest mount counts that the table
/// names for it.
pub(crate) fn served_mount_of(device: &Path) -> Option<PathBuf> {
    let servers = ServersOf::device(device);
    // If nothing tells servers apart, none is asked.
    let asks = servers.are_known() || servers.seed.is_some();
    let is_server = |dir: &PathBuf| {
        let is_included = || Channel::mount(dir).is_ok_and(|channel| servers.include(&channel));
        await_server(dir).is_ok() && (!asks || is_included())
    };
    // A filesystem may have been mounted by a device that left it, or by its seed.
    let others = || match servers.are_known() {
        true => FirstMount::all(device).iter().map(|mount| mount.dir().to_owned()).collect(),
        false => Vec::new(),
    };
    let members = || find_members(&[device]).map(|members| members.found).unwrap_or_default();
    ubtrfs_fuse::mount_points_of(device)
        .into_iter()
        .find(is_server)
        .or_else(|| members().iter().flat_map(|member| ubtrfs_fuse::mount_points_of(member)).find(is_server))
        .or_else(|| others().into_iter().find(is_server))
}
