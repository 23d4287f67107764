//! Commands on the filesystem as a whole.
//!
//! | command                    | needs                                                                                |
//! |----------------------------|--------------------------------------------------------------------------------------|
//! | sync                       | nothing but a file of the filesystem                                                 |
//! | stats                      | nothing but a file of the filesystem; only administrators see names of files         |
//! | info, label, mount options | nothing but a file of the filesystem                                                 |
//! | usage                      | nothing but a file of the filesystem; only administrators see what each device holds |
//! | set label, trim, interval  | the rights of an administrator ([`CommandContext::require_admin`])                   |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_fs::{MemberState, SpaceUsage};
use uuid::Uuid;

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};

/// A command on the filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Makes everything written so far durable.
    Sync,
    /// Returns the counters since the mount: [`Response::Stats`].
    Stats,
    /// Returns identity, features and sizes: [`Response::Info`].
    Info,
    /// Returns how the space is used: [`Response::Usage`].
    Usage,
    /// Returns the mount options as the user gave them: [`Response::MountOptions`].
    MountOptions,
    /// Sets the label.
    SetLabel {
        /// The new label: at most 255 bytes, none of which is 0; an empty label removes the old one.
        #[serde(with = "crate::bytes")]
        label: Vec<u8>,
    },
    /// Changes mount options, until the filesystem is unmounted ([`ubtrfs_fs::Fs::change_options`]).
    ChangeOptions {
        /// The options, each as in `-o`.
        options: Vec<String>,
    },
    /// Tells the devices which space is free: [`Response::Trimmed`].
    Trim {
        /// The first logical address of the range to trim.
        start: u64,
        /// The length of the range.
        len_bytes: u64,
        /// Free ranges with fewer bytes are not discarded.
        min_bytes: u64,
    },
}

/// The result of a command on the filesystem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The command succeeded.
    Done,
    /// Bytes that were discarded on the devices.
    Trimmed(u64),
    /// Counters as text for Prometheus.
    Stats(String),
    /// Identity, features and sizes.
    Info(FilesystemInfo),
    /// How the space is used.
    Usage(FilesystemUsage),
    /// Mount options.
    MountOptions(Vec<String>),
}

/// Identity, features and sizes of a filesystem, as of the last commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the superblock")]
pub struct FilesystemInfo {
    pub fsid: Uuid,
    pub metadata_uuid: Uuid,
    #[serde(with = "crate::bytes")]
    pub label: Vec<u8>,
    pub generation: u64,
    pub num_devices: u64,
    pub max_devid: u64,
    pub total_bytes: u64,
    pub nodesize: u32,
    pub sectorsize: u32,
    pub csum_type: u16,
    pub csum_size: u16,
    pub compat_flags: u64,
    pub compat_ro_flags: u64,
    pub incompat_flags: u64,
}

/// How the space of a filesystem is used; the fields are those of [`SpaceUsage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemUsage {
    /// Block groups by type and profile.
    pub groups: Vec<BlockGroupTotals>,
    /// Size of the global reserve.
    pub global_reserve: u64,
    /// Bytes of the global reserve that are in use.
    pub global_reserve_used: u64,
    /// Devices in order of their ids.
    pub devices: Vec<DeviceInfo>,
    /// Bytes that `df` shows as available.
    pub available: u64,
}

/// All block groups of one type and profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockGroupTotals {
    /// Bits of type and profile.
    pub flags: u64,
    /// Logical bytes.
    pub total: u64,
    /// Logical bytes that extents occupy.
    pub used: u64,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// The device id.
    pub devid: u64,
    /// The device UUID.
    pub uuid: Uuid,
    /// The path; `None` if the device is missing.
    pub path: Option<String>,
    /// Whether the device can be read and written: it is not missing, and has not failed.
    pub is_usable: bool,
    /// Whether the device has everything that was committed; for users, see [`DeviceInfo::state`].
    #[serde(default)]
    pub(crate) state: DeviceState,
    /// Whether it is a device of a seed, on which the filesystem builds.
    #[serde(default)]
    pub is_seed: bool,
    /// Bytes of the device that belong to the filesystem.
    pub total: u64,
    /// Bytes of the device beyond `total`.
    pub slack: u64,
    /// Bytes in device extents.
    pub allocated: u64,
    /// Bytes in device extents for each combination of type and profile bits; `None` if the caller may not see these
    /// numbers.
    pub groups: Option<Vec<(u64, u64)>>,
    /// Bytes in device extents for each combination of type and profile bits and number of stripes. Empty if the caller may
    /// not see these numbers.
    #[serde(default)]
    pub shares: Vec<(u64, usize, u64)>,
}

/// What became of a device since it joined the filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// It has everything that was committed.
    #[default]
    InSync,
    /// It missed changes, and is being brought up to date.
    Updating,
    /// It missed changes. A filesystem that is opened read-only does not bring it up to date.
    Behind,
    /// It was not given.
    Missing,
    /// It failed while the filesystem was open, and is not used any more.
    Failed,
}

impl DeviceState {
    /// Whether nothing can be read from the device: it is missing, or has failed.
    pub fn is_absent(self) -> bool {
        matches!(self, Self::Missing | Self::Failed)
    }

    fn of(state: MemberState, is_writable: bool) -> Self {
        match state {
            MemberState::InSync => Self::InSync,
            MemberState::Late(_) | MemberState::Stale(_) if is_writable => Self::Updating,
            MemberState::Late(_) | MemberState::Stale(_) => Self::Behind,
            MemberState::Missing => Self::Missing,
            MemberState::Kicked => Self::Failed,
        }
    }
}

impl DeviceInfo {
    /// A device as its superblock describes it.
    pub fn of(item: &DevItem, path: String) -> Self {
        Self {
            devid: item.devid.0,
            uuid: item.uuid,
            path: Some(path),
            is_usable: true,
            state: DeviceState::InSync,
            is_seed: false,
            total: item.total_bytes,
            slack: 0,
            allocated: item.bytes_used,
            groups: None,
            shares: Vec::new(),
        }
    }

    /// What became of the device. Older servers do not tell all.
    pub fn state(&self) -> DeviceState {
        match self.state {
            DeviceState::InSync if self.path.is_none() => DeviceState::Missing,
            DeviceState::InSync if !self.is_usable => DeviceState::Failed,
            state => state,
        }
    }
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Trim { .. })
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        matches!(self, Self::SetLabel { .. } | Self::Trim { .. })
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    match request {
        Request::Sync => {
            context.host.sync(context.fs)?;
            Ok(Response::Done)
        }
        Request::Stats => {
            let names_files = context.require_admin().is_ok();
            Ok(Response::Stats(context.fs.metrics_text() + &context.host.stats(names_files)))
        }
        Request::Info => Ok(Response::Info(info(context))),
        Request::Usage => usage(context).map(Response::Usage),
        Request::MountOptions => Ok(Response::MountOptions(context.host.mount_options())),
        Request::SetLabel { label } => {
            context.require_admin()?;
            context.fs.set_label(&label)?;
            Ok(Response::Done)
        }
        Request::ChangeOptions { options } => {
            context.require_admin()?;
            context.fs.change_options(&options)?;
            context.host.note_options(&context.fs.changeable_options());
            Ok(Response::Done)
        }
        Request::Trim { start, len_bytes, min_bytes } => {
            context.require_admin()?;
            let sectorsize = context.fs.superblock().sectorsize;
            if len_bytes < sectorsize.into() {
                let text = format!("the length to discard must be at least a sector of {sectorsize} bytes");
                return Err(CommandFailure::new(Errno::INVAL, text));
            }
            // Linux refuses this start, and takes any other.
            if start == u64::MAX {
                return Err(CommandFailure::new(Errno::INVAL, "the start of the range is the largest number"));
            }
            let range = start..start.saturating_add(len_bytes);
            Ok(Response::Trimmed(context.fs.trim(&range, min_bytes, context.job)?))
        }
    }
}

fn info(context: &CommandContext<'_>) -> FilesystemInfo {
    let superblock = context.fs.superblock();
    let max_devid = context.fs.space_usage().devices.last().map_or(0, |device| device.devid.0);
    FilesystemInfo::of(&superblock, max_devid)
}

impl FilesystemInfo {
    /// What a superblock says.
    pub fn of(superblock: &Superblock, max_devid: u64) -> Self {
        let csum_size = superblock.csum_type().map_or(0, |csum| csum.size());
        Self {
            fsid: superblock.fsid,
            metadata_uuid: superblock.node_fsid(),
            label: superblock.label().to_vec(),
            generation: superblock.generation.0,
            num_devices: superblock.num_devices,
            max_devid,
            total_bytes: superblock.total_bytes,
            nodesize: superblock.nodesize,
            sectorsize: superblock.sectorsize,
            csum_type: superblock.csum_type,
            csum_size: u16::try_from(csum_size).unwrap_or(0),
            compat_flags: superblock.compat_flags,
            compat_ro_flags: superblock.compat_ro_flags,
            incompat_flags: superblock.incompat_flags,
        }
    }
}

fn usage(context: &CommandContext<'_>) -> Result<FilesystemUsage> {
    let SpaceUsage { groups, global_reserve, devices } = context.fs.space_usage();
    let sees_all = context.require_admin().is_ok();
    let stat = context.fs.statfs()?;
    let is_writable = context.fs.read_only().is_none();
    let device = |device: ubtrfs_fs::DeviceUsage| {
        let shares = device.groups.iter().map(|share| (share.flags.bits(), share.nr_stripes, share.bytes));
        let shares: Vec<(u64, usize, u64)> = if sees_all { shares.collect() } else { Vec::new() };
        let mut groups: Vec<(u64, u64)> = Vec::new();
        for (flags, _, bytes) in &shares {
            match groups.iter_mut().find(|(other, _)| other == flags) {
                Some((_, sum)) => *sum = sum.saturating_add(*bytes),
                None => groups.push((*flags, *bytes)),
            }
        }
        DeviceInfo {
            devid: device.devid.0,
            uuid: device.uuid,
            path: device.path,
            is_usable: device.state.is_usable(),
            state: DeviceState::of(device.state, is_writable),
            is_seed: device.is_seed,
            total: device.total,
            slack: device.slack,
            allocated: device.allocated,
            groups: sees_all.then_some(groups),
            shares,
        }
    };
    Ok(FilesystemUsage {
        groups: groups
            .into_iter()
            .map(|group| BlockGroupTotals { flags: group.flags.bits(), total: group.total, used: group.used })
            .collect(),
        global_reserve: global_reserve.0,
        global_reserve_used: global_reserve.1,
        devices: devices.into_iter().map(device).collect(),
        available: stat.bavail.saturating_mul(u64::from(stat.bsize)),
    })
}

#[cfg(test)]
mod tests {
    use ubtrfs_format::Generation;

    use super::*;

    #[test]
    fn a_device_that_missed_changes_is_updated_only_in_a_writable_filesystem() {
        let stale = MemberState::Stale(Generation(7));
        assert_eq!(DeviceState::of(stale, true), DeviceState::Updating);
        assert_eq!(DeviceState::of(stale, false), DeviceState::Behind);
        assert_eq!(DeviceState::of(MemberState::Kicked, true), DeviceState::Failed);
    }

    #[test]
    fn the_device_of_an_older_server_has_a_state() {
        let json = r#"{"devid":1,"uuid":"00000000-0000-0000-0000-000000000000","path":"/a","is_usable":false,"total":1,
            "slack":0,"allocated":0,"groups":null}"#;
        let mut device: DeviceInfo = serde_json::from_str(json).expect("older servers send this");
        assert_eq!(device.state(), DeviceState::Failed);
        device.path = None;
        assert_eq!(device.state(), DeviceState::Missing);
        (device.path, device.is_usable) = (Some("/a".to_owned()), true);
        assert_eq!(device.state(), DeviceState::InSync);
    }
}
