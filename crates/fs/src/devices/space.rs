//! Space by kind and by device, and the filesystem's label.

use ubtrfs_format::DevId;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_transaction::MemberState;
use uuid::Uuid;

use crate::Fs;
use crate::error::Result;

/// The space of a filesystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Block groups by type and profile, in the order of their flag bits.
    pub groups: Vec<GroupUsage>,
    /// The size of the global reserve, and how much of it is in use.
    pub global_reserve: (u64, u64),
    /// Devices, including missing ones, in the order of their ids.
    pub devices: Vec<DeviceUsage>,
}

/// All block groups of one type and profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupUsage {
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Logical bytes in the block groups.
    pub total: u64,
    /// Logical bytes of extents.
    pub used: u64,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Its id.
    pub devid: DevId,
    /// Its UUID.
    pub uuid: Uuid,
    /// The device's path; `None` if the device is missing.
    pub path: Option<String>,
    /// Whether the device has everything that was committed.
    pub state: MemberState,
    /// Whether it is a device of a seed, which is only read.
    pub is_seed: bool,
    /// Size of the filesystem on the device, in bytes, allocated or not.
    pub total: u64,
    /// Bytes of the device past `total`.
    pub slack: u64,
    /// Bytes in device extents.
    pub allocated: u64,
    /// Its device extents by type, profile and number of stripes.
    pub groups: Vec<DeviceShare>,
}

/// The device extents that chunks of one type, profile and number of stripes have on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceShare {
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Number of stripes of each chunk.
    pub nr_stripes: usize,
    /// Bytes on the device.
    pub bytes: u64,
}

impl Fs {
    /// Returns how the filesystem's space is used.
    pub fn space_usage(&self) -> SpaceUsage {
        let mut groups: Vec<GroupUsage> = Vec::new();
        for group in self.engine.block_groups() {
            match groups.iter_mut().find(|sum| sum.flags == group.flags) {
                Some(sum) => {
                    sum.total = sum.total.saturating_add(group.len_bytes);
                    sum.used = sum.used.saturating_add(group.used);
                }
                None => groups.push(GroupUsage { flags: group.flags, total: group.len_bytes, used: group.used }),
            }
        }
        groups.sort_by_key(|group| group.flags.bits());
        let allocated = self.engine.allocated_by_device();
        let device = |device: ubtrfs_transaction::DeviceSummary| {
            let of_device = allocated.range((device.devid, 0, 0)..=(device.devid, u64::MAX, usize::MAX));
            let len = self.engine.device_size(device.devid).map_or(device.total_bytes, |(_, len)| len);
            DeviceUsage {
                devid: device.devid,
                uuid: device.uuid,
                path: device.path,
                state: device.state,
                is_seed: device.is_seed,
                total: device.total_bytes,
                slack: len.saturating_sub(device.total_bytes),
                allocated: device.bytes_used,
                groups: of_device
                    .map(|((_, flags, nr_stripes), bytes)| DeviceShare {
                        flags: BlockGroupFlags::from_bits_retain(*flags),
                        nr_stripes: *nr_stripes,
                        bytes: *bytes,
                    })
                    .collect(),
            }
        };
        let mut devices: Vec<DeviceUsage> = self.engine.devices().into_iter().map(device).collect();
        devices.sort_by_key(|device| device.devid);
        let usage = self.engine.usage();
        // A read-only mount has an empty reserve: both numbers are 0.
        let in_use = usage.metadata.global_size.saturating_sub(usage.metadata.global_reserved);
        SpaceUsage { groups, global_reserve: (usage.global_reserve, in_use), devices }
    }

    /// Sets the label. The new label is durable on return.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::set_label`].
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.set_label(label)?)
    }
}
