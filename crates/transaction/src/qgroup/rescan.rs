//! A rescan: computes the numbers of all groups again. Each commit counts the extents of a part of the extent tree, in
//! the order of their addresses.
//!
//! Invariants:
//! - I1. While a rescan runs, at the end of each commit, the numbers include exactly the extents below the address that
//!   the status item records as the progress. Changes of extents at or above that address are not accounted
//!   ([`super::account`]). So an interrupted rescan can continue from that address at the next mount, in Linux too.

use std::time::{Duration, Instant};

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::QgroupStatus;
use ubtrfs_format::{Generation, Key, KeyType, RootId};
use ubtrfs_tree::Cursor;

use super::items::NO_RESCAN;
use crate::backref::refs::read_refs;
use crate::backref::roots::RootsOf;
use crate::backref::view::TreesView;
use crate::engine::Engine;

impl Engine {
    /// If a rescan runs, adds the extents in the next part of the extent tree to the groups' numbers. The caller holds
    /// the commit lock, and the extent tree records all references of subvolumes.
    pub(crate) fn rescan_quotas(&self, transid: Generation) {
        let start = match &*self.quotas.lock() {
            Some(state) if state.is_rescanning() => state.status.rescan,
            _ => return,
        };
        let counted = self.rescan_part(start, transid);
        let Some(state) = &mut *self.quotas.lock() else { return };
        match counted {
            Ok(Some(next)) => state.status.rescan = next,
            Ok(None) => {
                state.status.flags &= !(QgroupStatus::RESCAN | QgroupStatus::INCONSISTENT);
                state.status.rescan = NO_RESCAN;
            }
            Err(error) => {
                tracing::error!("the rescan of quotas stopped: {error}");
                state.status.flags &= !QgroupStatus::RESCAN;
                state.status.flags |= QgroupStatus::INCONSISTENT;
                state.status.rescan = NO_RESCAN;
            }
        }
    }

    /// Adds the extents from the address `start` on to the groups' numbers, until the time for one commit is used up.
    /// Returns the first address that is not counted; `None` at the end of the extent tree.
    fn rescan_part(&self, start: u64, transid: Generation) -> Result<Option<u64>> {
        let began = Instant::now();
        let view = TreesView::running(self)?;
        let (source, root, nodesize) = (view.source(), *view.extent_root(), view.nodesize());
        let mut roots = RootsOf::new(view);
        let mut cursor = Cursor::new(source, root);
        let mut key = cursor.seek_ge(&Key::new(start, KeyType(0), 0))?;
        let mut nr_extents = 0usize;
        while let Some(at) = key {
            let len_bytes = match at.item_type {
                KeyType::METADATA_ITEM => nodesize,
                KeyType::EXTENT_ITEM => at.offset,
                _ => {
                    key = cursor.next()?;
                    continue;
                }
            };
            if nr_extents > 0 && nr_extents.is_multiple_of(CLOCK_CHECK_INTERVAL) && began.elapsed() >= PART {
                return Ok(Some(at.objectid));
            }
            nr_extents = nr_extents.saturating_add(1);
            let extent = read_refs(&mut cursor, &at, len_bytes)?;
            key = cursor.key();
            let users = roots.of_refs(&extent).map_err(|error: Error| error.in_tree(RootId::EXTENT_TREE))?;
            if !users.is_empty()
                && let Some(state) = &mut *self.quotas.lock()
            {
                state.groups.count(&[], &users, len_bytes, transid);
            }
        }
        Ok(None)
    }
}

/// Number of extents between two checks of the clock.
const CLOCK_CHECK_INTERVAL: usize = if cfg!(test) { 8 } else { 128 };
/// Approximate time that each commit spends on counting extents for a rescan.
const PART: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 150 });

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use ubtrfs_device::{Device, MemoryDevice};
    use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run};

    use crate::backref::tests::open;
    use crate::{Engine, EngineOptions, QuotaKind};

    fn numbers(engine: &Engine) -> BTreeMap<u64, (u64, u64)> {
        let groups = engine.qgroups().expect("quotas are on");
        groups.into_iter().map(|group| (group.id.0, (group.referenced, group.exclusive))).collect()
    }

    #[test]
    fn a_read_only_filesystem_with_an_unfinished_rescan_can_be_closed() {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let open = |read_only| {
            let device = Arc::clone(&device) as Arc<dyn Device>;
            Engine::open(vec![device], EngineOptions { read_only, ..EngineOptions::default() }).expect("opened")
        };
        let engine = open(false);
        engine.enable_quotas(QuotaKind::Full).expect("enabled");
        assert!(engine.quotas.is_rescanning(), "a commit counts only 8 extents");
        drop(engine);
        let engine = open(true);
        assert!(engine.quotas.is_rescanning());
        engine.close().expect("nothing is to be written");
    }

    /// In tests a commit counts 8 extents, so every rescan takes many commits.
    #[test]
    fn a_rescan_goes_on_where_a_power_cut_or_an_unmount_interrupted_it() {
        if !capability::kernel_oracle() {
            return;
        }
        let image = Image::kernel_made(512 << 20, &["-n", "4096"]).expect("made");
        let mount = LoopMount::new(image.path(), "").expect("mounted");
        let script = "btrfs -q subvolume create a; for n in $(seq 200); do head -c 5000 /dev/urandom > a/f$n; done
            btrfs -q subvolume snapshot a b; for n in $(seq 0 7 200); do echo changed > b/f$n; done; sync";
        run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).expect("made");
        mount.close().expect("unmounted");
        let engine = open(&image);
        engine.enable_quotas(crate::QuotaKind::Full).expect("enabled");
        drop(engine);
        let mut nr_opens = 0;
        let mut last = 0;
        let engine = loop {
            // The image now has the content that a power cut would leave.
            let engine = open(&image);
            let Some(at) = engine.quota_status().expect("on").rescan else { break engine };
            assert!(at > last && engine.has_steps_left(), "it goes on where it was: {last} {at}");
            last = at;
            nr_opens += 1;
            for _ in 0..nr_opens % 4 {
                engine.commit().expect("committed");
            }
            engine.commit().expect("committed");
            // The next round opens the image again, so close it here.
            drop(engine);
        };
        assert!(nr_opens > 10, "{nr_opens}");
        assert!(engine.quota_status().expect("on").consistent);
        let resumed = numbers(&engine);
        engine.start_quota_rescan().expect("started");
        while engine.quota_status().expect("on").rescan.is_some() {
            engine.commit().expect("committed");
        }
        // Since the first numbers were read, only tree blocks may have moved, and the number of tree blocks is
        // unchanged.
        assert_eq!(numbers(&engine), resumed);
        drop(engine);
        btrfs_check(image.path()).expect("clean");
        run("btrfs", ["check", "--readonly", "--qgroup-report", &image.path().display().to_string()]).expect("equal");
    }
}
