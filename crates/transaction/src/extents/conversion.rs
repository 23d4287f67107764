//! [`Conversion`]: the profiles that a balance converts block groups to.
//!
//! While a conversion runs or is paused, new chunks have its target profile, as in Linux. A new chunk with the old
//! profile would have to be converted too.
//!
//! Owns the targets under a lock. No other lock is taken under the lock of the targets.

use parking_lot::Mutex;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_space::SpaceKind;

use crate::engine::Engine;

/// The target profiles of a conversion by kind of space; `None` where block groups keep their profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversionTargets {
    /// The target for data block groups: [`BlockGroupFlags::DUP`], or empty for single. In mixed block groups, the
    /// target also applies to metadata.
    pub data: Option<BlockGroupFlags>,
    /// The target for metadata block groups.
    pub metadata: Option<BlockGroupFlags>,
    /// The target for system block groups.
    pub system: Option<BlockGroupFlags>,
}

/// The targets of the conversion that runs or is paused.
#[derive(Debug, Default)]
pub(crate) struct Conversion {
    targets: Mutex<ConversionTargets>,
}

impl Conversion {
    /// The target profile of new chunks of this kind, if there is one.
    pub(crate) fn target(&self, kind: SpaceKind) -> Option<BlockGroupFlags> {
        let targets = self.targets.lock();
        match kind {
            SpaceKind::Data => targets.data,
            SpaceKind::Metadata => targets.metadata,
            SpaceKind::System => targets.system,
        }
    }
}

impl Engine {
    /// Sets the target profiles of new chunks. When this returns, no thread is making a chunk of another profile.
    pub fn set_conversion(&self, targets: ConversionTargets) {
        {
            let _making = self.pending_chunks.lock_making();
            *self.conversion.targets.lock() = targets;
        }
        self.update_unallocated();
    }
}
