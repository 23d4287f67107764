//! How writeback writes a file: whether it compresses the data, and whether the data gets checksums. Data that does not
//! shrink stays uncompressed ([`crate::writeback::ordered_data`]).

use ubtrfs_format::item::{Compression, InodeFlags};

use crate::Fs;
use crate::compression::CompressionMethod;
use crate::inode::state::{CompressionProperty, InodeState};
use crate::writeback::ordered_data::Policy;

impl Fs {
    /// The policy for a file in this state, by its flags, its property and the mount options.
    pub(super) fn policy(&self, state: &InodeState) -> Policy {
        let flags = state.item.flags();
        let csums = !flags.contains(InodeFlags::NODATASUM);
        if flags.intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM) {
            return Policy { compress: None, force: false, csums };
        }
        if let Some(method) = state.rewriting.and_then(|rewriting| rewriting.compress) {
            return Policy { compress: Some(method), force: true, csums };
        }
        if flags.contains(InodeFlags::PREALLOC) {
            return Policy { compress: None, force: false, csums };
        }
        let option = self.data_options.read().compress;
        let force = option.is_some_and(|option| option.force);
        let by_option = option.map(|option| CompressionMethod { kind: option.kind, level: option.level });
        let compress = match state.compression {
            _ if flags.contains(InodeFlags::NOCOMPRESS) && !force => None,
            CompressionProperty::Method(kind) => Some(match by_option {
                Some(method) if method.kind == kind => method,
                _ => CompressionMethod { kind, level: 0 },
            }),
            CompressionProperty::Unset if flags.contains(InodeFlags::COMPRESS) => {
                Some(by_option.unwrap_or(CompressionMethod { kind: Compression::Zlib, level: 0 }))
            }
            CompressionProperty::Unset => by_option,
        };
        Policy { compress, force, csums }
    }
}
