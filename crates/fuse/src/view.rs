//! Views: the FUSE filesystems through which the kernel sees one btrfs filesystem.
//!
//! Without `submounts` there is one view, which shows all subvolumes. With `submounts` each view shows one subvolume, as
//! the kernel has one superblock, and so one `st_dev`, for each (`submounts`). The first view is the mounted subvolume's.
//! Others come and go.
//!
//! - V1. An inode is shown by at most one view. So what the kernel caches of it is in one place, and one notification
//!   makes the kernel forget it.
//! - V2. A view that does not exist has nothing in the kernel's caches.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use ubtrfs_format::RootId;
use ubtrfs_fs::InodeId;

use crate::name_cache::NameCache;
use crate::node::NodeIds;
use crate::seek::PageFlusher;
use crate::transport::Notifier;

/// One FUSE filesystem.
#[derive(Debug)]
pub(crate) struct FuseView {
    /// The subvolume that it shows, or whose inodes keep their numbers if it shows all.
    pub(crate) subvolume: RootId,
    pub(crate) nodes: Arc<NodeIds>,
    pub(crate) names: NameCache,
    /// Set once the connection exists.
    pub(crate) notifier: Arc<OnceLock<Notifier>>,
    /// Makes the kernel write back dirty pages; set once the view has a server.
    pub(crate) pages: OnceLock<Arc<PageFlusher>>,
    /// The device number (`st_dev`), once the view is mounted.
    pub(crate) device: OnceLock<u64>,
    /// A number that no other view of this process has.
    pub(crate) serial: u64,
}

impl FuseView {
    pub(crate) fn new(subvolume: RootId, nodes: NodeIds, serial: u64) -> Self {
        let notifier = Arc::new(OnceLock::new());
        let names = NameCache::new(notifier.clone());
        let (nodes, pages, device) = (Arc::new(nodes), OnceLock::new(), OnceLock::new());
        Self { subvolume, nodes, names, notifier, pages, device, serial }
    }

    /// A number for a request of this view that no request of another view has.
    pub(crate) fn unique(&self, unique: u64) -> u64 {
        unique ^ self.serial << SERIAL_SHIFT
    }
}

/// The kernel counts the requests of each connection from 0. No connection has as many.
const SERIAL_SHIFT: u32 = 44;

/// All views of a filesystem.
#[derive(Debug)]
pub(crate) struct FuseViews {
    first: Arc<FuseView>,
    /// The other views by subvolume; `None` if the first view shows all subvolumes.
    others: Option<RwLock<HashMap<RootId, Arc<FuseView>>>>,
}

impl FuseViews {
    /// With `submounts`, the first view shows one subvolume only.
    pub(crate) fn new(first: FuseView, submounts: bool) -> Self {
        Self { first: Arc::new(first), others: submounts.then(RwLock::default) }
    }

    pub(crate) fn first(&self) -> &Arc<FuseView> {
        &self.first
    }

    /// Whether each view shows one subvolume.
    pub(crate) fn are_submounts(&self) -> bool {
        self.others.is_some()
    }

    /// The view that shows a subvolume, if there is one (V2).
    pub(crate) fn of(&self, subvolume: RootId) -> Option<Arc<FuseView>> {
        match &self.others {
            Some(others) if subvolume != self.first.subvolume => others.read().get(&subvolume).cloned(),
            _ => Some(Arc::clone(&self.first)),
        }
    }

    /// The view with this device number: the newest, because Linux gives the number of a view that has ended to the next
    /// filesystem.
    pub(crate) fn with_device(&self, device: u64) -> Option<Arc<FuseView>> {
        let with_it = |view: &Arc<FuseView>| view.device.get() == Some(&device);
        self.all().into_iter().filter(with_it).max_by_key(|view| view.serial)
    }

    pub(crate) fn all(&self) -> Vec<Arc<FuseView>> {
        let others = self.others.iter().flat_map(|others| others.read().values().cloned().collect::<Vec<_>>());
        std::iter::once(Arc::clone(&self.first)).chain(others).collect()
    }

    pub(crate) fn add(&self, view: &Arc<FuseView>) {
        if let Some(others) = &self.others {
            others.write().insert(view.subvolume, Arc::clone(view));
        }
    }

    pub(crate) fn remove(&self, subvolume: RootId) {
        if let Some(others) = &self.others {
            others.write().remove(&subvolume);
        }
    }

    /// The inode number that `stat` shows, also for an inode that no view shows now.
    pub(crate) fn st_ino(&self, id: InodeId) -> u64 {
        match self.of(id.root) {
            Some(view) => view.nodes.st_ino(id),
            None => NodeIds::of_one_subvolume(id.root).st_ino(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_views_with_a_device_number_the_newer_one_is_mounted() {
        let view = |id: u64, serial| {
            let view = Arc::new(FuseView::new(RootId(id), NodeIds::of_one_subvolume(RootId(id)), serial));
            view.device.set(7).unwrap();
            view
        };
        let views = FuseViews::new(FuseView::new(RootId(5), NodeIds::of_one_subvolume(RootId(5)), 0), true);
        // A view that has ended is still known for a moment.
        for (ended, next) in [(300, 301), (302, 256)] {
            views.add(&view(ended, ended));
            views.add(&view(next, ended + 1));
            assert_eq!(views.with_device(7).unwrap().subvolume, RootId(next));
            views.remove(RootId(ended));
            views.remove(RootId(next));
        }
        assert!(views.with_device(7).is_none());
    }
}
