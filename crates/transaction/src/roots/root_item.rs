//! Makes new root items.

use ubtrfs_format::item::{InodeItem, RootItem, Timespec};
use ubtrfs_format::{Generation, Key};
use ubtrfs_tree::RootPtr;
use uuid::Uuid;

/// A root item as Linux initialises it: no references, no UUIDs, no times.
pub(crate) fn blank_root_item(root: &RootPtr, nodesize: u32) -> RootItem {
    let (zero, epoch) = (Generation(0), Timespec { sec: 0, nsec: 0 });
    let inode = InodeItem {
        generation: Generation(1),
        transid: zero,
        size: 3,
        nbytes: nodesize.into(),
        block_group: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        mode: 0o040_755,
        rdev: 0,
        flags: 0,
        sequence: 0,
        reserved: [0; 4],
        atime: epoch,
        ctime: epoch,
        mtime: epoch,
        otime: epoch,
    };
    RootItem {
        inode,
        generation: root.generation,
        root_dirid: 0,
        bytenr: root.bytenr,
        byte_limit: 0,
        bytes_used: 0,
        last_snapshot: zero,
        flags: 0,
        refs: 0,
        drop_progress: Key::MIN,
        drop_level: 0,
        level: root.level,
        generation_v2: root.generation,
        uuid: Uuid::nil(),
        parent_uuid: Uuid::nil(),
        received_uuid: Uuid::nil(),
        ctransid: zero,
        otransid: zero,
        stransid: zero,
        rtransid: zero,
        ctime: epoch,
        otime: epoch,
        stime: epoch,
        rtime: epoch,
        reserved: [0; 8],
    }
}
